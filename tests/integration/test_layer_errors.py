"""Errors of single layers and experts: against a plain computation, and each judged alone."""

from __future__ import annotations

import math

import pytest
import torch

tf = pytest.importorskip("transformers")
import int8moe.transformers as it  # noqa: E402
from int8moe.errors import ConfigError  # noqa: E402
from int8moe.layer_errors import LayerErrors, LayerSums, split  # noqa: E402
from tiny_models import make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")
IDS = torch.arange(60).view(2, 30) * 7 % 311


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe", path, dtype=torch.float32)
    return path


def load(folder, scheme=None):
    return it.load(folder, "reference", quantize=scheme is not None, scheme=scheme, device="cpu")


def measure(original, ids=IDS, **candidates):
    errors = LayerErrors()
    with errors.attached(original, candidates), torch.inference_mode():
        original(input_ids=ids, use_cache=False)
    return errors


def test_equals_a_plain_computation(folder):
    original, int8 = load(folder), load(folder, "w8a8")
    errors = measure(original, w8a8=int8)
    calls = {}
    name = "model.layers.1.mlp.experts"
    module, other = original.get_submodule(name), int8.get_submodule(name)
    hook = module.register_forward_hook(lambda m, args, out: calls.update(args=args, out=out))
    with torch.inference_mode():
        original(input_ids=IDS, use_cache=False)
        hook.remove()
        x, ids, weights = calls["args"]
        sums = errors.layers[name]
        want = (other(x, ids, weights) - calls["out"]).norm() / calls["out"].norm()
        assert sums.errors()["w8a8"] == pytest.approx(float(want), rel=1e-4)
        for e in range(8):
            mine = torch.where(ids == e, weights, 0.0)  # the same routing, the other experts silenced
            y = module(x, ids, mine)
            assert int(sums.tokens[e]) == int((ids == e).sum())
            if e not in sums.unseen:
                want = (other(x, ids, mine) - y).norm() / y.norm()
                assert sums.expert_errors(e)["w8a8"] == pytest.approx(float(want), rel=1e-4)


def test_a_broken_expert_shows_in_its_layer_alone(folder):
    original, int8 = load(folder), load(folder, "w8a8")
    before = measure(original, w8a8=int8)
    int8.get_submodule("model.layers.0.mlp.experts")._int8.kernel.experts._run.weights.w2[3] = 0
    after = measure(original, w8a8=int8)
    first, second = (f"model.layers.{i}.mlp.experts" for i in (0, 1))
    assert after.layers[second].errors() == before.layers[second].errors()
    rows = after.to_list()
    assert rows[0]["name"] == first and rows[0]["experts"][0]["expert"] == 3
    assert rows[0]["experts"][0]["error"]["w8a8"] == pytest.approx(1.0)
    for e in set(range(8)) - {3}:
        assert after.layers[first].expert_errors(e) == pytest.approx(before.layers[first].expert_errors(e), nan_ok=True)


def test_batches_add_up_and_unseen_experts_are_named(folder):
    original, int8 = load(folder), load(folder, "w8a16")
    whole = measure(original, w8a16=int8)
    parts = LayerErrors()
    with parts.attached(original, {"w8a16": int8}), torch.inference_mode():
        for row in IDS:
            original(input_ids=row[None], use_cache=False)
    for name, sums in whole.layers.items():
        assert parts.layers[name].errors()["w8a16"] == pytest.approx(sums.errors()["w8a16"], rel=1e-4)
        assert torch.equal(parts.layers[name].tokens, sums.tokens)
    few = measure(original, IDS[:1, :1], w8a16=int8).to_list()
    for row in few:
        assert len(row["unseen"]) == 6 and len(row["experts"]) == 2
        assert math.isnan(row["from_activations"])  # without w8a8 there is nothing to split


def test_hooks_go_and_time_is_kept(folder):
    original, int8 = load(folder), load(folder, "w8a8")
    errors = measure(original, w8a8=int8)
    count = errors.layers["model.layers.0.mlp.experts"].tokens.clone()
    assert errors.seconds > 0
    with torch.inference_mode():
        original(input_ids=IDS, use_cache=False)
    assert torch.equal(errors.layers["model.layers.0.mlp.experts"].tokens, count)
    with (
        pytest.raises(ConfigError, match="no experts modules of the same name"),
        errors.attached(original, {"w8a8": original}),
    ):
        pass


def test_rows_sorted_by_expert(tmp_path):
    original = make_model("llama4_text", tmp_path, dtype=torch.float32)
    original = load(tmp_path)
    errors = measure(original, w8a8=load(tmp_path, "w8a8"), w8a16=load(tmp_path, "w8a16"))
    assert errors.layers
    for sums in errors.layers.values():
        assert int(sums.tokens.sum()) == IDS.numel()  # top-1
        found = sums.errors()
        assert 0 < found["w8a16"] < found["w8a8"] < 0.1
        assert float(sums.expert_size.sum()) == pytest.approx(sums.size, rel=1e-6)  # top-1: no experts overlap
        assert float(sums.expert_error["w8a8"].sum()) == pytest.approx(sums.error["w8a8"], rel=1e-6)


def test_split_and_empty_sums():
    assert split({"w8a8": 0.05, "w8a16": 0.03}) == (0.03, pytest.approx(0.04))
    assert split({"w8a8": 0.02, "w8a16": 0.03}) == (0.03, 0.0)
    assert all(math.isnan(v) for v in split({"w8a8": 0.05})[:1])
    empty = LayerSums("x", torch.zeros(2, dtype=torch.int64), torch.zeros(2), error={"w8a8": 0.0})
    assert math.isnan(empty.errors()["w8a8"]) and empty.unseen == [0, 1]
