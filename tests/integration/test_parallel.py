"""INT8 experts divided over two processes by Transformers' own plans: by experts, and by rows and columns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

tf = pytest.importorskip("transformers")
pytest.importorskip("accelerate")
if tuple(int(n) for n in tf.__version__.split(".")[:2]) < (5, 24):
    pytest.skip("the plans of Transformers 5.24", allow_module_level=True)
import int8moe.transformers as it  # noqa: E402
from families import make_model  # noqa: E402

IDS = torch.arange(2 * 9).reshape(2, 9) * 7 % 320
RANK = """
import sys, torch, torch.distributed as dist
torch.set_num_threads(1)
import transformers as tf
from transformers.distributed import DistributedConfig
import int8moe.transformers as it
from int8moe.errors import UnsupportedDeployment
kind, path, out = sys.argv[1:4]
more = {"quantization_config": it.Int8MoeConfig(backend="reference")}
if kind.endswith("int8"):
    more = {"config": it.adapt_config(tf.AutoConfig.from_pretrained(path), backend="reference")}
plan = DistributedConfig(tp_size=2, **({"ep_size": 2} if kind.startswith("ep") else {}))
model = tf.AutoModelForCausalLM.from_pretrained(path, distributed_config=plan, **more)
with torch.no_grad():
    logits = model(torch.arange(18).reshape(2, 9) * 7 % 320).logits
logits = logits.full_tensor() if hasattr(logits, "full_tensor") else logits
layout = next(m for m in model.modules() if isinstance(m, it.Int8Experts))._int8.layout
try:
    model.save_pretrained(out + ".saved")
    refused = False
except UnsupportedDeployment:
    refused = True
if dist.get_rank() == 0:
    torch.save({"logits": logits, "share": (layout.num_experts, layout.intermediate), "refused": refused}, out)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, one_thread):
    folder = tmp_path_factory.mktemp("parallel")
    os.environ["INT8MOE_DEVICE"] = "cpu"
    tf.utils.logging.disable_progress_bar()
    make_model("qwen3_moe", folder / "online", dtype=torch.float32)
    whole = it.load(folder / "online", "reference")
    whole.save_pretrained(folder / "int8")
    with torch.no_grad():
        yield folder, whole(IDS).logits
    del os.environ["INT8MOE_DEVICE"]


@pytest.mark.parametrize("kind", ["ep-online", "tp-int8"])
def test_two_ranks_compute_what_one_does(kind: str, checkpoints, tmp_path: Path) -> None:
    folder, want = checkpoints
    source = folder / kind.partition("-")[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    (tmp_path / "rank.py").write_text(RANK)
    done = subprocess.run(
        [*launch, str(tmp_path / "rank.py"), kind, str(source), str(tmp_path / "out")],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    found = torch.load(tmp_path / "out")
    assert found["share"] == ((4, 24) if kind.startswith("ep") else (8, 12)) and found["refused"]
    error = float((found["logits"] - want).norm() / want.norm())
    # Sums over ranks round elsewhere, which moves a code now and then; dividing columns also divides what a scale of
    # the second GEMM's input covers. A rank's experts missing or doubled would be an error of tens of percent.
    assert error < (0.005 if kind.startswith("ep") else 0.02)
