"""Writes a Ray wheel without what a local cluster of workers does not use: jars, dashboard pages, Ray's libraries.

    python strip_ray.py ray-2.60.0-cp312-cp312-manylinux2014_x86_64.whl FOLDER

That removes half of the wheel's 76 MiB.
"""

import csv
import io
import sys
import zipfile
from pathlib import Path

UNUSED = (
    "ray/jars/", "ray/cpp/", "ray/dashboard/client/", "ray/rllib/", "ray/tune/", "ray/train/", "ray/data/",
    "ray/serve/", "ray/llm/", "ray/air/", "ray/workflow/", "ray/tests/", "ray/core/libjemalloc.so",
)  # fmt: skip
UNUSED_ENDS = (".pyi", ".map")


def is_unused(name: str) -> bool:
    return name.startswith(UNUSED) or name.endswith(UNUSED_ENDS)


def strip(wheel: Path, folder: Path) -> Path:
    """Returns the wheel that was written into `folder`, under the same name."""
    target = folder / wheel.name
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as out:
        for info in source.infolist():
            if is_unused(info.filename):
                continue
            data = source.read(info)
            if info.filename.endswith(".dist-info/RECORD"):
                data = _record(data.decode())
            kept = zipfile.ZipInfo(info.filename, info.date_time)
            kept.external_attr, kept.compress_type = info.external_attr, zipfile.ZIP_DEFLATED
            out.writestr(kept, data, compresslevel=9)
    return target


def _record(text: str) -> bytes:
    """Returns a wheel's list of files without those that are left out."""
    written = io.StringIO()
    csv.writer(written, lineterminator="\n").writerows(
        row for row in csv.reader(io.StringIO(text)) if not is_unused(row[0])
    )
    return written.getvalue().encode()


if __name__ == "__main__":
    before = Path(sys.argv[1])
    after = strip(before, Path(sys.argv[2]))
    print(f"{before.name}: {before.stat().st_size / 2**20:.1f} MiB, now {after.stat().st_size / 2**20:.1f}")
