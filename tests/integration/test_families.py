"""Every MoE family of Transformers with INT8 experts: one set of bits, whichever way the weights came."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

tf = pytest.importorskip("transformers")
import int8moe.transformers as it  # noqa: E402
from families import DENSE, FAMILIES, LEFT_OUT, make_model  # noqa: E402
from int8moe.errors import CheckpointError, UnsupportedDeployment  # noqa: E402
from int8moe.quantize.checkpoint import quantize_checkpoint  # noqa: E402

IDS = torch.arange(2 * 9).reshape(2, 9) * 7 % 320
TAKEN = [k for k, f in FAMILIES.items() if f.refusal is None]
REFUSED = [k for k, f in (FAMILIES | DENSE).items() if f.refusal is not None]


pytestmark = pytest.mark.usefixtures("quiet_transformers", "on_the_cpu")


VERSION = tuple(int(n) for n in tf.__version__.split(".")[:2])


def known(kind: str) -> None:
    """Skip where the installed Transformers is older than the family."""
    family = (FAMILIES | DENSE)[kind]
    if (family.model_type or kind) not in tf.CONFIG_MAPPING or family.since > VERSION:
        pytest.skip(f"Transformers {tf.__version__} has no {kind}, or not with these fields")


class Made:
    """One family's random bf16 model, its checkpoint, and the same with INT8 experts; made when first asked for."""

    def __init__(self, kind: str, folder: Any) -> None:
        self.kind, self.folder, self.family = kind, folder, FAMILIES[kind]
        self.plain = make_model(kind, folder / "bf16")
        self._online: Any = None

    def load(self, path: Any, backend: str = "reference", **kwargs: Any) -> Any:
        return it.load(path, backend, model_class=self.family.model_class, **kwargs)

    @property
    def online(self) -> Any:
        if self._online is None:
            self._online = self.load(self.folder / "bf16")
        return self._online


_last: dict[str, Made] = {}


@pytest.fixture
def made(kind, tmp_path_factory):
    """The tests of one family follow each other, so one is kept."""
    known(kind)
    if kind not in _last:
        _last.clear()
        _last[kind] = Made(kind, tmp_path_factory.mktemp(kind))
    return _last[kind]


def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    with torch.inference_mode():
        return model(ids).logits


def assert_same_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    assert want.isfinite().all()
    assert torch.equal(got, want), f"largest difference {float((got - want).abs().max()):.3g}"


@pytest.mark.parametrize("kind", TAKEN, scope="module")
class TestFamily:
    def test_reference_and_cpu_kernel_agree(self, kind, made):
        if made.family.staged:  # no kernel computes it, and a backend asked for by name runs or raises
            with pytest.raises(UnsupportedDeployment, match=r"experts .*'cpu'"):
                made.load(made.folder / "bf16", "cpu")
            cpu = made.load(made.folder / "bf16", "auto", device="cpu")
        else:
            cpu = made.load(made.folder / "bf16", "cpu")
            assert {r.backend for r in it.explain_model(cpu)} == {"CPU"}
        assert_same_bits(logits(cpu), logits(made.online))

    def test_near_the_float_model(self, kind, made):
        """The first experts see the float model's input, so their output's error is the quantisation's alone.

        Rows are 16 to 48 normal values, whose largest is below 4 sigma: steps of at most 4/127 sigma, an rms error of
        at most 4/127/sqrt(12) = 0.9% for weights and activations of either product, 1.8% for all four; gate and up both
        carry the first product's, so 2.2%, and 3% with room for a lucky sample. After that a router may choose
        otherwise between two near ties. One token of 18 that came out unlike itself would cost 1/18 of the cosine,
        and the residual stream keeps most of it: 2% allows that for a token or two.
        """
        float_first, int8_first = (_first_experts(m) for m in (made.plain, made.online))
        assert 0 < _relative(int8_first, float_first) < 0.03
        got, want = logits(made.online).float().flatten(), logits(made.plain).float().flatten()
        assert torch.nn.functional.cosine_similarity(got, want, dim=0) > 0.98

    def test_generates_with_a_cache(self, kind, made):
        if not made.family.generates:
            pytest.skip("does not write text")
        ids = IDS[:, :5]
        out = made.online.generate(ids, max_new_tokens=3, do_sample=False, eos_token_id=None, pad_token_id=1)
        assert out.shape == (2, 8) and torch.equal(out[:, :5], ids)
        assert torch.equal(out[:, 5], logits(made.online, ids)[:, -1].argmax(-1))

    def test_a_converted_checkpoint_is_the_online_model(self, kind, made):
        quantize_checkpoint(made.folder / "bf16", made.folder / "int8")
        assert it.is_int8_checkpoint(made.folder / "int8")
        assert_same_bits(logits(made.load(made.folder / "int8")), logits(made.online))

    def test_saved_and_loaded_again(self, kind, made):
        made.online.save_pretrained(made.folder / "saved")
        assert it.is_int8_checkpoint(made.folder / "saved")
        assert_same_bits(logits(made.load(made.folder / "saved")), logits(made.online))


def _first_experts(model: Any) -> torch.Tensor:
    """Output of the first experts module that runs."""
    seen: list[torch.Tensor] = []
    hooks = [
        m.register_forward_hook(lambda _m, _a, out: seen.append(out))
        for n, m in model.named_modules()
        if n.endswith(".experts") and "shared" not in n
    ]
    logits(model)
    for hook in hooks:
        hook.remove()
    return seen[0].float()


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got - want).norm() / want.norm())


@pytest.mark.parametrize("kind", REFUSED)
def test_refused_by_name_or_reason(kind, tmp_path):
    known(kind)
    family = (FAMILIES | DENSE)[kind]
    make_model(kind, tmp_path / "bf16")
    ways = [
        lambda: it.load(tmp_path / "bf16", "reference", model_class=family.model_class),
        lambda: family.model_class.from_pretrained(tmp_path / "bf16", quantization_config=it.Int8MoeConfig()),
        lambda: quantize_checkpoint(tmp_path / "bf16", tmp_path / "int8"),
    ]
    for way in ways:
        with pytest.raises(CheckpointError, match=family.refusal) as refused:
            way()
        assert "\n" not in str(refused.value)
    assert not (tmp_path / "int8").exists()
    it.load(tmp_path / "bf16", quantize=False, model_class=family.model_class)


@pytest.mark.skipif(VERSION > (5, 24), reason="newer Transformers may have more families")
def test_no_family_is_forgotten():
    """Every folder of Transformers' models with an experts class has an entry, or a reason not to."""
    models = Path(tf.__file__).parent / "models"
    experts = re.compile(r"^class \w+Experts\b", re.MULTILINE)
    found = {p.parent.name for p in models.glob("*/modeling_*.py") if experts.search(p.read_text())}
    types = [f.model_type or kind for kind, f in FAMILIES.items()]
    here = {tf.CONFIG_MAPPING[t].__module__.split(".")[-2] for t in types if t in tf.CONFIG_MAPPING}
    assert len(found) > 20 and found - here - set(LEFT_OUT) == set()
