"""What a conversion will do, from `config.json` and the headers of the shards alone: every tensor in, every one out.

Each tensor of the source becomes pieces. An expert's own matrix, a shared expert's or a dense Linear's is one piece
under its own name; a tensor that stacks all experts is cut into `<P>.experts.<e>.{gate_proj,up_proj,down_proj}`, with
rows de-interleaved and matrices turned to [out, in]; all else is copied.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from int8moe.errors import CheckpointError
from int8moe.model_config import ModelExperts, expert_groups, parse_model_experts, read_json
from int8moe.quantize import fp8
from int8moe.quantize.experts_class import why_outside
from int8moe.quantize.fused import Fused, read_fused
from int8moe.quantize.naming import TARGETS, ExpertTensor, is_linear, is_target, parse

logger = logging.getLogger(__name__)

INDEX = "model.safetensors.index.json"
_NEEDS = "needs a folder with config.json and safetensors files"
SCALE_DTYPES = {"float32": ("F32", torch.float32), "bfloat16": ("BF16", torch.bfloat16)}
FLOATS = ("F64", "F32", "F16", "BF16")
SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "U64": 8, "I32": 4, "U32": 4, "I16": 2, "U16": 2, "I8": 1,
    "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "C64": 8,
}  # fmt: skip


@dataclass(frozen=True)
class Output:
    """A tensor of the result; dtype is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


@dataclass(frozen=True)
class Piece:
    """A part of a source tensor that becomes one tensor of the result (and its scales, where it is quantised).

    Args:
        name, shape: of the result; [out, in] of a matrix.
        action: "quantize" to int8, "dequantize" FP8 to bf16, or "copy" the bytes.
        expert: index into the first dimension of a stacked tensor.
        first, step: where its rows start and how far apart they are.
        transposed: the stored matrix is [in, out].
    """

    name: str
    shape: tuple[int, ...]
    action: Literal["quantize", "dequantize", "copy"] = "copy"
    expert: int | None = None
    first: int = 0
    step: int = 1
    transposed: bool = False

    def rows(self, stored: torch.Tensor, start: int, stop: int) -> torch.Tensor:
        """Rows start:stop of the piece, a view of the tensor as it is stored."""
        if self.expert is not None:
            stored = stored[self.expert]
        if self.transposed:
            stored = stored.transpose(0, 1)
        return stored[self.first + start * self.step : self.first + (stop - 1) * self.step + 1 : self.step]

    def floats(
        self, stored: torch.Tensor, scale: torch.Tensor | None, block: tuple[int, int], start: int, stop: int
    ) -> torch.Tensor:
        """Rows start:stop as float [rows, in]; FP8 codes are multiplied with the scales of their blocks."""
        codes = self.rows(stored, start, stop)
        if scale is None:
            return codes
        if self.expert is not None:
            scale = scale[self.expert]
        if self.transposed:
            scale, block = scale.transpose(0, 1), block[::-1]
        return fp8.dequantize_rows(codes, scale, self.first + torch.arange(start, stop) * self.step, block)


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source: where it is, what it becomes.

    Args:
        dtype: safetensors' name.
        routed: it holds routed experts.
        pieces: none for the scales of FP8 weights, which go into those.
        scale: name of the FP8 scales.
    """

    name: str
    shard: str
    shape: tuple[int, ...]
    dtype: str
    routed: bool = False
    pieces: tuple[Piece, ...] = ()
    scale: str | None = None

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * SIZES.get(self.dtype, 2)

    def outputs(self, piece: Piece, scale_dtype: str) -> list[Output]:
        if piece.action == "copy":
            return [Output(piece.name, self.dtype, piece.shape)]
        if piece.action == "dequantize":
            return [Output(piece.name, "BF16", piece.shape)]
        scales = Output(f"{piece.name}_scale", SCALE_DTYPES[scale_dtype][0], (piece.shape[0], 1))
        return [Output(piece.name, "I8", piece.shape), scales]

    def output_bytes(self, scale_dtype: str) -> int:
        return sum(out.nbytes for piece in self.pieces for out in self.outputs(piece, scale_dtype))


@dataclass
class Plan:
    """What a conversion will do; made from headers alone."""

    source: Path
    experts: ModelExperts
    config: dict[str, Any]
    shards: dict[str, list[Tensor]]
    scale_dtype: str = "float32"
    targets: str = "experts"
    block: tuple[int, int] = (1, 1)

    @property
    def tensors(self) -> Iterator[Tensor]:
        for tensors in self.shards.values():
            yield from tensors

    def bytes(self) -> dict[str, int]:
        pairs = [(t.nbytes, t.output_bytes(self.scale_dtype), t.routed) for t in self.tensors]
        return {
            "before": sum(b for b, _, _ in pairs),
            "after": sum(a for _, a, _ in pairs),
            "experts_before": sum(b for b, _, e in pairs if e),
            "experts_after": sum(a for _, a, e in pairs if e),
        }

    def ignored(self) -> list[str]:
        """The Linears that stay as they are, by name."""
        return [
            piece.name.removesuffix(".weight")
            for t in self.tensors
            for piece in t.pieces
            if piece.action != "quantize" and is_linear(piece.name, piece.shape)
        ]


# --- reading the source --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def open_shard(path: Path) -> Iterator[Any]:
    """safetensors' reader, with its errors (truncated file, lying header) as one line."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from None


def make_plan(source: str | Path, scale_dtype: str = "float32", targets: str = "experts") -> Plan:
    """Read config and headers, and check that every expert is there, whole and of the right shape.

    Raises:
        CheckpointError: what is missing or wrong, with its name.
    """
    source = Path(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; needs one with config.json and safetensors files.")
    for what, value, known in (("scale dtype", scale_dtype, tuple(SCALE_DTYPES)), ("targets", targets, TARGETS)):
        if value not in known:
            raise CheckpointError(f"{what} is {value!r}, needs one of: {', '.join(known)}.")
    config = read_json(source / "config.json", _NEEDS)
    quantization = quantization_of(config)
    block = fp8.read_block(quantization, str(source)) if quantization else None
    if refusal := why_outside(config.get("model_type")):
        raise CheckpointError(f"{source}: {refusal}")
    experts = parse_model_experts(config, str(source / "config.json"))
    headers = _read_headers(source)
    plan = Plan(source, experts, config, {}, scale_dtype, targets, block or (1, 1))
    scales = _check_dtypes(headers, block)
    modules = _per_expert_modules(headers)
    fused, changed = _fused_tensors(plan, headers, bool(modules))
    for module, tensors in sorted(modules.items()):
        _check_module(plan, module, tensors)
    _check_modules(plan, {*modules, *(f.prefix for f in fused.values())})
    vocab = next((c["vocab_size"] for c in (config, config.get("text_config") or {}) if "vocab_size" in c), None)
    for name, header in sorted(headers.items()):
        dropped = name.endswith(fp8.SUFFIX) and name.removesuffix(fp8.SUFFIX) in scales
        wanted = parse(name) is not None or (name not in changed and is_target(name, header.shape, targets, vocab))
        pieces = () if dropped else _pieces(header, fused.get(name), wanted)
        routed = name in fused or parse(name) is not None
        if dropped:
            weight = name.removesuffix(fp8.SUFFIX)
            routed = weight in fused or parse(weight) is not None
        shard = plan.shards.setdefault(header.shard, [])
        shard.append(Tensor(name, header.shard, header.shape, header.dtype, routed, pieces, scales.get(name)))
    twice = [n for n, c in Counter(p.name for t in plan.tensors for p in t.pieces).items() if c > 1]
    if twice:
        raise CheckpointError(f"{twice[0]} is there twice (a second name or shard for the same weights).")
    return plan


def quantization_of(config: dict[str, Any]) -> dict[str, Any] | None:
    """What `config.json` says of a quantisation, at its top or in its text model's part."""
    for part in (config, config.get("text_config")):
        for key in ("quantization_config", "compression_config"):
            if isinstance(part, dict) and isinstance(part.get(key), dict) and part[key]:
                return dict(part[key])
    return None


def _read_headers(source: Path) -> dict[str, Tensor]:
    weight_map: dict[str, str] | None = None
    if (source / "model.safetensors").exists():  # Transformers reads it, too, whatever index stands beside it
        shards = ["model.safetensors"]
    elif (source / INDEX).exists():
        weight_map = read_json(source / INDEX, _NEEDS).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{source / INDEX} has no weight_map of tensor names to files.")
        shards = sorted(set(weight_map.values()))
        for name in shards:
            if Path(name).name != name:
                raise CheckpointError(f"{source / INDEX} names a file outside the folder: {name}.")
    else:
        raise CheckpointError(f"{source} holds neither {INDEX} nor model.safetensors.")
    headers: dict[str, Tensor] = {}
    for shard in shards:
        with open_shard(source / shard) as file:
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                if name in headers:
                    raise CheckpointError(f"{name} is there twice (a second name or shard for the same weights).")
                headers[name] = Tensor(name, shard, tuple(view.get_shape()), str(view.get_dtype()))
    for name, shard in (weight_map or {}).items():
        if name not in headers or headers[name].shard != shard:
            raise CheckpointError(f"{source / shard} lacks {name}, which {INDEX} says it holds.")
    return headers


def _check_dtypes(headers: dict[str, Tensor], block: tuple[int, int] | None) -> dict[str, str]:
    """Every FP8 weight has its block scales; returns their names by weight."""
    scales: dict[str, str] = {}
    for name, t in headers.items():
        if t.dtype not in SIZES:
            raise CheckpointError(f"{name} has dtype {t.dtype}, needs one of {', '.join(SIZES)}.")
        if not t.dtype.startswith("F8"):
            continue
        scale = headers.get(f"{name}{fp8.SUFFIX}")
        if block is None or t.dtype != fp8.DTYPE or scale is None or len(t.shape) < 2:
            raise CheckpointError(
                f"{name} has dtype {t.dtype}, needs one of {', '.join(FLOATS)}; or {fp8.DTYPE} of a matrix with"
                f" {name}{fp8.SUFFIX} beside it and quantization_config.weight_block_size in config.json."
            )
        want = fp8.scale_shape(t.shape, block)
        if scale.shape != want or scale.dtype not in FLOATS:
            raise CheckpointError(
                f"{scale.name} is {scale.dtype} of shape {scale.shape}, needs floats of shape {want}: one for"
                f" {block[0]} x {block[1]} weights of {name} {t.shape}."
            )
        scales[name] = scale.name
    return scales


# --- experts with a matrix each ------------------------------------------------------------------------------------

Module = list[tuple[Tensor, ExpertTensor]]


def _per_expert_modules(headers: dict[str, Tensor]) -> dict[str, Module]:
    modules: dict[str, Module] = {}
    for t in headers.values():
        found = parse(t.name)
        if found is None or len(t.shape) != 2:
            continue
        if t.dtype not in (*FLOATS, fp8.DTYPE):
            raise CheckpointError(f"{t.name} has dtype {t.dtype}, needs one of {', '.join(FLOATS)}; quantised already?")
        modules.setdefault(found.module, []).append((t, found))
    return modules


def _check_module(plan: Plan, module: str, tensors: Module) -> None:
    """All experts are there, each with the same matrices, of the same shapes, which fit each other."""
    groups = expert_groups(plan.config)
    experts = plan.experts.num_experts * groups
    extra = sorted(found.expert for _, found in tensors if found.expert >= experts)
    if extra:
        raise CheckpointError(f"{module} holds expert {extra[0]}, and config.json has num_experts {experts}.")
    roles = {found.role for _, found in tensors}
    if roles & {"gate", "up", "down"}:
        roles |= {"gate", "up", "down"} if plan.experts.is_act_and_mul else {"up", "down"}
    have = {(found.expert, found.role) for _, found in tensors}
    missing = [f"{module}.{e} ({role})" for e in range(experts) for role in sorted(roles) if (e, role) not in have]
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise CheckpointError(f"{plan.source} lacks the weights of {missing[0]}{more}.")
    if groups > 1:  # text and vision experts, each of their own width
        return
    usual = {role: Counter(t.shape for t, f in tensors if f.role == role).most_common(1)[0][0] for role in roles}
    for t, found in tensors:
        if t.shape != usual[found.role]:
            raise CheckpointError(f"{t.name} has shape {t.shape}, needs {usual[found.role]} as the other experts'.")
    if {"up", "down"} <= roles:
        turned = usual["down"][::-1]
        for role in roles & {"gate", "up"}:
            if usual[role] != turned:
                raise CheckpointError(
                    f"{module}: the experts' {role} matrices have shape {usual[role]}, need {turned}, since down is"
                    f" {usual['down']}."
                )


# --- experts stacked in one tensor ---------------------------------------------------------------------------------


def _fused_tensors(plan: Plan, headers: dict[str, Tensor], others: bool) -> tuple[dict[str, Fused], set[str]]:
    """The stacked experts tensors, and the Linears that have to stay since the model fuses or splits them. The model's
    class is asked only where there may be some."""
    stacked = [
        t.name
        for t in headers.values()
        if len(t.shape) == 3
        and 1 not in t.shape
        and t.dtype in (*FLOATS, fp8.DTYPE)
        and ("expert" in t.name or (not others and t.shape[0] == plan.experts.num_experts))
    ]
    if not stacked and plan.targets == "experts":
        return {}, set()
    shapes = {t.name: t.shape for t in headers.values() if len(t.shape) in (2, 3) and parse(t.name) is None}
    try:
        fused, changed = read_fused(plan.config, shapes, plan.source)
    except CheckpointError as error:
        if stacked:
            raise
        logger.warning("%s Linears that it fuses while loading are not told apart.", error)
        return {}, set()
    for name, found in fused.items():
        if headers[name].dtype not in (FLOATS if found.bias else (*FLOATS, fp8.DTYPE)):
            raise CheckpointError(f"{name} has dtype {headers[name].dtype}, needs one of {', '.join(FLOATS)}.")
    if stacked and not fused and not others:
        raise CheckpointError(
            f"{plan.source} holds stacked tensors, {stacked[0]} among them, but no experts module of model_type"
            f" {plan.experts.model_type!r} takes them through Transformers' common experts interface."
        )
    return fused, changed


def _check_modules(plan: Plan, modules: set[str]) -> None:
    if not modules:
        raise CheckpointError(
            f"{plan.source} holds no routed-expert tensors (model_type {plan.experts.model_type!r}); needs names like"
            " ...experts.0.gate_proj.weight, or stacked tensors that the model's class knows."
        )
    if len(modules) < plan.experts.num_layers:  # more are fine: multi-token prediction layers have experts too
        raise CheckpointError(
            f"{plan.source} has experts in {len(modules)} layers, and config.json describes {plan.experts.num_layers}."
        )


def _pieces(t: Tensor, fused: Fused | None, wanted: bool) -> tuple[Piece, ...]:
    if fused is not None:
        return tuple(_stacked_pieces(t, fused))
    if wanted and len(t.shape) == 2 and t.dtype in (*FLOATS, fp8.DTYPE):
        return (Piece(t.name, t.shape, "quantize"),)
    if t.dtype == fp8.DTYPE:
        if len(t.shape) != 2:
            raise CheckpointError(f"{t.name} is FP8 of shape {t.shape} and no experts'; needs a matrix.")
        return (Piece(t.name, t.shape, "dequantize"),)
    return (Piece(t.name, t.shape),)


def _stacked_pieces(t: Tensor, fused: Fused) -> Iterator[Piece]:
    prefix, count = fused.prefix, len(fused.leaves)
    rows = fused.shape[1] // count
    for expert in range(fused.shape[0]):
        for i, leaf in enumerate(fused.leaves):
            first, step = (i, count) if fused.interleaved else (i * rows, 1)
            name = f"{prefix}.{expert}.{leaf}.{'bias' if fused.bias else 'weight'}"
            if fused.bias:
                yield Piece(name, (rows,), "copy", expert, first, step)
            else:
                yield Piece(name, (rows, fused.shape[2]), "quantize", expert, first, step, fused.transposed)
