#!/bin/sh
# In the root of Heed's tree: `sh benchmarks/gpu/first_quarter/prepare.sh`. Makes .first_quarter/, which git ignores, for
# a machine with a GPU and no network: src/ with these scripts and the commit, whl/ with the wheels that it lacks (51 MiB,
# for Python 3.12 on x86-64 Linux), smollm2-0 and -1 with the halves of a real model. full/ is not needed there. $PY is the
# Python with pip (default: .venv/bin/python).
set -e
here=$(cd "$(dirname "$0")" && pwd)
python=${PY:-.venv/bin/python}
rm -rf .first_quarter/src .first_quarter/whl .first_quarter/full
mkdir -p .first_quarter/src .first_quarter/whl .first_quarter/full
cp "$here"/*.py "$here"/chain.toml .first_quarter/src/
git rev-parse HEAD > .first_quarter/src/commit.txt

# The version of constraints.txt, in which "-", "_" and capitals are not told apart.
pinned() {
    found=$(grep -iE "^$(echo "$1" | sed 's/[-_]/[-_]/g')==" constraints.txt) || {
        echo "constraints.txt has no version of $1" >&2
        exit 1
    }
    echo "$found"
}

download() { # into a folder: requirements
    folder=$1
    shift
    "$python" -m pip download -q --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 --platform manylinux_2_27_x86_64 --platform manylinux_2_17_x86_64 \
        --platform manylinux2014_x86_64 --platform manylinux1_x86_64 -d ".first_quarter/$folder" "$@"
}

# What Heed, Ray and DeepSpeed need and torch, Transformers and Accelerate do not bring.
wheels=
for name in pydantic pydantic-core annotated-types typing-inspection sqlalchemy alembic mako tomli-w tenacity hjson \
    jsonschema jsonschema-specifications referencing rpds-py attrs datasets dill multiprocess einops msgpack ninja \
    py-cpuinfo protobuf click requests urllib3 idna certifi charset-normalizer httpx httpcore h11 anyio gguf sacrebleu \
    portalocker tabulate colorama; do
    version=$(pinned "$name")
    wheels="$wheels $version"
done
# shellcheck disable=SC2086
download whl $wheels
version=$(pinned ray)
download full "$version"
"$python" "$here/strip_ray.py" .first_quarter/full/ray-*.whl .first_quarter/whl
version=$(pinned deepspeed)
"$python" -m pip wheel -q --no-deps -w .first_quarter/whl "$version"
# SmolLM2-135M's file is larger than what one call carries beside the tree, so it travels in two parts.
make -s smollm2-model
split -n 2 -d -a 1 models/SmolLM2-135M-Instruct.gguf .first_quarter/smollm2-
du -ch .first_quarter/whl .first_quarter/src .first_quarter/smollm2-*
