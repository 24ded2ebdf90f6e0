"""PEFT on a model with INT8 experts: adapters on the attention train, are saved, loaded and merged."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
import int8moe.transformers as it  # noqa: E402
from tiny_models import make_model  # noqa: E402

pytestmark = pytest.mark.usefixtures("quiet_transformers", "on_the_cpu")
IDS = torch.arange(2 * 17).reshape(2, 17) * 7 % 320


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    make_model("qwen3_moe", path, dtype=torch.float32)
    return path


def experts_of(model):
    return {n: t.clone() for n, t in model.state_dict().items() if ".experts." in n}


def logits(model):
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_lora_on_the_attention(backend, folder, tmp_path):
    base = it.load(folder, backend)
    before, start = experts_of(base), logits(base)
    torch.manual_seed(0)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"]))
    assert torch.equal(logits(model), start)  # an adapter starts as nothing
    adapters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert len(adapters) == 2 * 2 * 2 and all("lora_" in n for n in adapters)
    optimiser = torch.optim.AdamW(adapters.values(), lr=1e-2)
    losses = []
    for step in range(8):
        optimiser.zero_grad()
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        if step:  # in the first step lora_B is zero, and so is what reaches lora_A
            assert all(p.grad is not None and float(p.grad.abs().sum()) > 0 for p in adapters.values())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0] - 0.3 and losses == sorted(losses, reverse=True), losses
    after = experts_of(base)
    assert before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)

    want = logits(model)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(it.load(folder, backend), tmp_path / "adapter")
    assert torch.equal(logits(again), want)
    merged = again.merge_and_unload()
    assert float((logits(merged) - want).abs().max()) < 1e-4 * float(want.abs().max())
    merged.save_pretrained(tmp_path / "merged")
    assert it.is_int8_checkpoint(tmp_path / "merged")
    assert torch.equal(logits(it.load(tmp_path / "merged", backend)), logits(merged))


def test_experts_themselves_have_no_adapters(folder):
    """PEFT's adapters of parameters find none; it warns, and the experts stay what they are."""
    base = it.load(folder, "reference")
    with pytest.warns(RuntimeWarning, match="target_parameters"):
        model = peft.get_peft_model(
            base, peft.LoraConfig(r=4, target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])
        )
    model(IDS, labels=IDS).loss.backward()
    assert all("q_proj" in n for n, p in model.named_parameters() if p.requires_grad)


def test_all_linear_and_preparation_for_training(folder):
    prepared = peft.prepare_model_for_kbit_training(it.load(folder, "cpu"))
    model = peft.get_peft_model(prepared, peft.LoraConfig(r=2, target_modules="all-linear"))
    model.train()
    model(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
