"""A job that starts from a hub model, on workers whose machine cannot see the driver's downloads."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from cluster.config import ClusterConfig
from cluster.connection import connect, disconnect
from heed.jobs.job_file import load_job
from heed.jobs.models import fetch_models, hub_models
from heed.jobs.recovery import Workers
from heed.jobs.run import Run
from lm.tokenizer import Tokenizer
from lm.weights import load_language_model
from ppo.initial_models import InitialModels, ScoreScale
from tests.hub_server import NAME, Hub, serve
from training.stage import StageContext

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "configs" / "jobs" / "debug.toml"


@pytest.fixture
def hub(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub; workers that start from now on keep downloads in `worker`, and this process keeps them in `driver`."""
    with serve(model_folder) as served:
        for name, value in served.environment(tmp_path / "worker").items():
            monkeypatch.setitem(os.environ, name, value)
        served.reach(monkeypatch, tmp_path / "driver")
        connect(2)
        yield served
        disconnect()


def folders_of_rank(_context: StageContext, folder: Path, models: InitialModels) -> tuple[Path, Path, int]:
    own = models.on_this_machine()
    assert isinstance(own.reward, Path)
    assert Tokenizer.load(folder) == Tokenizer.load(own.sft)
    return folder, own.reward, load_language_model(folder).config.vocab_size


def test_every_machine_fetches_a_hub_model_for_itself(hub: Hub, tmp_path: Path) -> None:
    job = load_job(DEBUG, [f"reward.init_from={NAME}"])
    (model,) = hub_models(job)
    (tmp_path / "driver").rename(tmp_path / "elsewhere")  # another machine's disk
    hub.downloads.clear()
    workers = Workers((2,), tmp_path, ClusterConfig(), models=[model])
    run = Run(job, tmp_path, None, workers)
    assert workers().num_workers == 2
    assert set(hub.downloads.values()) == {1}  # before any stage asks, and once for both ranks
    models = InitialModels(model, model, ScoreScale(0.0, 1.0), None)
    for folder, reward, vocab_size in run.of("sft").on_ranks(folders_of_rank, model, models):
        assert folder == reward == tmp_path / "worker" / model.relative_to(tmp_path / "driver")
        assert vocab_size == 288
    assert set(hub.downloads.values()) == {1}
    unknown = tmp_path / "models--owner--other" / "snapshots" / ("c3" * 20)
    with pytest.raises(ValueError, match=rf"^{os.uname().nodename}: 'owner/other' is neither a local folder nor"):
        fetch_models(workers(), [unknown])
    workers.abandon()
