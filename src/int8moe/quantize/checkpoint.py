"""Convert a bf16 safetensors checkpoint into a compressed-tensors `int-quantized` one, shard by shard.

The result holds `<expert>.weight` int8 [out, in] with `<expert>.weight_scale` [out, 1]; everything else is copied as it
is. A file gets its final name only when it is whole, and `config.json` comes last, so an unfinished folder does not
load. A state file lets a later run go on where one stopped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from int8moe.errors import CheckpointError
from int8moe.model_config import ModelExperts, parse_model_experts
from int8moe.quantize.compressed_tensors import to_compressed_tensors
from int8moe.quantize.int8 import quantize_weight
from int8moe.quantize.naming import FUSED_FAMILIES, ExpertTensor, parse

INDEX = "model.safetensors.index.json"
STATE = ".int8moe-quantize.json"
SCALE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_FLOATS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_SIZES = {**_FLOATS, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".msgpack", ".h5")

Progress = Callable[[str, int, int], None]
"""Called as progress(what, done_bytes, total_bytes) after each tensor."""


@dataclass(frozen=True)
class Tensor:
    """A tensor of the source: where it is, its shape and dtype (safetensors' name)."""

    name: str
    shard: str
    shape: tuple[int, ...]
    dtype: str
    expert: ExpertTensor | None

    @property
    def nbytes(self) -> int:
        count = 1
        for size in self.shape:
            count *= size
        return count * _SIZES.get(self.dtype, 2)

    def output_bytes(self, scale_bytes: int) -> int:
        if self.expert is None:
            return self.nbytes
        count = self.nbytes // _SIZES[self.dtype]
        return count + count // self.shape[-1] * scale_bytes


@dataclass
class Plan:
    """What a conversion will do; made from headers alone."""

    source: Path
    experts: ModelExperts
    config: dict[str, Any]
    shards: dict[str, list[Tensor]]
    scale_dtype: str = "float32"

    @property
    def tensors(self) -> Iterator[Tensor]:
        for tensors in self.shards.values():
            yield from tensors

    def bytes(self) -> dict[str, int]:
        scale = 4 if self.scale_dtype == "float32" else 2
        pairs = [(t.nbytes, t.output_bytes(scale), t.expert is not None) for t in self.tensors]
        return {
            "before": sum(b for b, _, _ in pairs),
            "after": sum(a for _, a, _ in pairs),
            "experts_before": sum(b for b, _, e in pairs if e),
            "experts_after": sum(a for _, a, e in pairs if e),
        }


@dataclass
class QuantizeReport:
    """What was done. Bytes are of tensors; `worst_error` is the largest |w - scale * q| / scale (at most 0.5)."""

    source: str
    destination: str
    bytes_before: int
    bytes_after: int
    experts_before: int
    experts_after: int
    expert_matrices: int
    other_tensors: int
    shards: int
    resumed_shards: list[str] = field(default_factory=list)
    seconds: float = 0.0
    verified: bool = False
    worst_error: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# --- reading the source --------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _open(path: Path) -> Iterator[Any]:
    """safetensors' reader, with its errors (truncated file, lying header) as one line."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist.") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is not a whole safetensors file: {error}.") from None


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist; needs a folder with config.json and safetensors files."
        ) from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}.") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}, needs a JSON object.")
    return value


def make_plan(source: str | Path, scale_dtype: str = "float32") -> Plan:
    """Read config and headers, and check that every expert is there, whole and of the right shape.

    Raises:
        CheckpointError: what is missing or wrong, with its name.
    """
    source = Path(source)
    if not source.is_dir():
        raise CheckpointError(f"{source} is not a folder; needs one with config.json and safetensors files.")
    if scale_dtype not in SCALE_DTYPES:
        raise CheckpointError(f"scale dtype is {scale_dtype!r}, needs one of: {', '.join(SCALE_DTYPES)}.")
    config = _read_json(source / "config.json")
    if config.get("quantization_config") or config.get("compression_config"):
        method = (config.get("quantization_config") or config["compression_config"]).get("quant_method", "unknown")
        raise CheckpointError(f"{source} is quantised already ({method}); needs a bf16, fp16 or fp32 checkpoint.")
    experts = parse_model_experts(config, str(source / "config.json"))
    shards: dict[str, list[Tensor]] = {}
    weight_map: dict[str, str] | None = None
    if (source / INDEX).exists():
        weight_map = _read_json(source / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise CheckpointError(f"{source / INDEX} has no weight_map of tensor names to files.")
        names = sorted(set(weight_map.values()))
        for name in names:
            if Path(name).name != name:
                raise CheckpointError(f"{source / INDEX} names a file outside the folder: {name}.")
    elif (source / "model.safetensors").exists():
        names = ["model.safetensors"]
    else:
        raise CheckpointError(f"{source} holds neither {INDEX} nor model.safetensors.")
    for shard in names:
        with _open(source / shard) as file:
            tensors = []
            for name in file.keys():  # noqa: SIM118
                view = file.get_slice(name)
                tensors.append(Tensor(name, shard, tuple(view.get_shape()), str(view.get_dtype()), parse(name)))
        shards[shard] = sorted(tensors, key=lambda t: t.name)
    if weight_map is not None:
        have = {(t.name, t.shard) for tensors in shards.values() for t in tensors}
        for name, shard in weight_map.items():
            if (name, shard) not in have:
                raise CheckpointError(f"{source / shard} lacks {name}, which {INDEX} says it holds.")
    plan = Plan(source, experts, config, shards, scale_dtype)
    _check_experts(plan)
    return plan


def _check_experts(plan: Plan) -> None:
    """Every experts module has all experts, each with gate, up and down of the configuration's shapes."""
    e, h, i = plan.experts.num_experts, plan.experts.hidden_dim, plan.experts.intermediate_size
    per_expert = {"gate": (i, h), "up": (i, h), "down": (h, i)}
    fused = {"gate_up": (e, 2 * i, h), "down": (e, h, i)}
    modules: dict[str, set[tuple[int | None, str]]] = {}
    for t in plan.tensors:
        if t.expert is None:
            continue
        if t.dtype not in _FLOATS:
            raise CheckpointError(
                f"{t.name} has dtype {t.dtype}, needs one of {', '.join(_FLOATS)}; quantised already?"
            )
        if t.expert.expert is None and plan.experts.model_type not in FUSED_FAMILIES:
            raise CheckpointError(
                f"{t.name} holds all experts at once, in a layout not known for model_type {plan.experts.model_type!r};"
                f" known for: {', '.join(FUSED_FAMILIES)}."
            )
        want = fused[t.expert.role] if t.expert.expert is None else per_expert[t.expert.role]
        if t.shape != want:
            raise CheckpointError(f"{t.name} has shape {t.shape}, needs {want} from config.json.")
        found = modules.setdefault(t.expert.module, set())
        if (t.expert.expert, t.expert.role) in found:
            raise CheckpointError(f"{t.name} is there twice (a second name or shard for the same weights).")
        found.add((t.expert.expert, t.expert.role))
    if not modules:
        raise CheckpointError(
            f"{plan.source} holds no routed-expert tensors known here (model_type {plan.experts.model_type!r});"
            " needs names like ...experts.0.gate_proj.weight, ...experts.0.w1.weight or ...experts.gate_up_proj."
        )
    for module, found in sorted(modules.items()):
        whole = {(None, role) for role in fused}
        if found & whole:
            missing = [
                f"{module}.{'gate_up_proj' if r == 'gate_up' else 'down_proj'}"
                for _, r in sorted(whole - found, key=str)
            ]
        else:
            missing = [f"{module}.{n} ({r})" for n in range(e) for r in per_expert if (n, r) not in found]
        extra = sorted(n for n, _ in found if n is not None and n >= e)
        if extra:
            raise CheckpointError(f"{module} holds expert {extra[0]}, and config.json has num_experts {e}.")
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise CheckpointError(f"{plan.source} lacks the weights of {missing[0]}{more}.")
    if len(modules) != plan.experts.num_layers:
        raise CheckpointError(
            f"{plan.source} has experts in {len(modules)} layers, and config.json describes {plan.experts.num_layers}."
        )


# --- writing -------------------------------------------------------------------------------------------------------


def _write_whole(path: Path, write: Callable[[Path], None]) -> None:
    """Write under a temporary name, sync, rename; on any error nothing stays under either name."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors makes files that only their owner can read
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except SafetensorError as error:
        raise CheckpointError(f"{path} could not be written: {error}.") from None
    except OSError as error:
        raise CheckpointError(f"{path} could not be written: {error.strerror or error}.") from None
    finally:
        temporary.unlink(missing_ok=True)


def _return_memory() -> None:
    """Give freed memory back to the system: glibc would keep much of a shard for the next one, and add to it."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, value: Any) -> None:
    _write_whole(path, lambda p: _put(p, json.dumps(value, indent=2) + "\n"))


def _put(path: Path, text: str) -> None:
    path.write_text(text)


def _matrices(tensor: Tensor, view: Any, num_experts: int) -> Iterator[tuple[str, torch.Tensor]]:
    """(module name, float matrix [out, in]) of every matrix in an expert tensor, one at a time."""
    assert tensor.expert is not None
    names = tensor.expert.output_names(num_experts)
    if tensor.expert.expert is not None:
        yield names[0][0], view[:]
        return
    for expert, leaves in enumerate(names):
        parts = view[expert : expert + 1].squeeze(0).chunk(len(leaves), dim=0)
        yield from zip(leaves, parts, strict=True)


def _convert_shard(plan: Plan, shard: str, target: Path, report: Callable[[Tensor], None]) -> dict[str, int]:
    """One shard; returns the bytes of each tensor written."""
    out: dict[str, torch.Tensor] = {}
    with _open(plan.source / shard) as file:
        for tensor in plan.shards[shard]:
            view = file.get_slice(tensor.name)
            if tensor.expert is None:
                out[tensor.name] = file.get_tensor(tensor.name)
            else:
                for name, matrix in _matrices(tensor, view, plan.experts.num_experts):
                    codes, scale = quantize_weight(matrix, f"{name}.weight", SCALE_DTYPES[plan.scale_dtype])
                    out[f"{name}.weight"], out[f"{name}.weight_scale"] = codes, scale.unsqueeze(-1)
            report(tensor)
        _write_whole(target, lambda p: save_file(out, p, metadata={"format": "pt"}))
    return {name: t.numel() * t.element_size() for name, t in out.items()}


def quantization_config(plan: Plan) -> dict[str, Any]:
    """The compressed-tensors description: W8A8 on Linears, with every Linear that is not an expert ignored by name."""
    others = [t.name.removesuffix(".weight") for t in plan.tensors if t.expert is None and len(t.shape) == 2]
    return to_compressed_tensors("w8a8", others)


def _fingerprint(plan: Plan) -> dict[str, Any]:
    """What a resumed run must find unchanged."""
    stats = {name: (plan.source / name).stat() for name in plan.shards}
    return {
        "format": 1,
        "scale_dtype": plan.scale_dtype,
        "source": {name: [s.st_size, s.st_mtime_ns] for name, s in stats.items()},
        "config": plan.config,
    }


def _prepare_destination(plan: Plan, destination: Path, overwrite: bool) -> dict[str, Any]:
    """Make or check the folder; returns the state of an earlier run to go on from, or a fresh one."""
    source, target = plan.source.resolve(), destination.resolve()
    if target == source or source in target.parents or target in source.parents:
        raise CheckpointError(
            f"{destination} and {plan.source} are the same folder or one inside the other; needs two apart."
        )
    fresh = {**_fingerprint(plan), "done": {}}
    if destination.is_dir():
        for left in destination.glob(".*.tmp"):  # of a run that was killed
            left.unlink()
    if destination.exists() and not destination.is_dir():
        raise CheckpointError(f"{destination} is a file, needs a folder (or a name that does not exist).")
    if destination.is_dir() and any(destination.iterdir()):
        state: dict[str, Any] = {}
        with contextlib.suppress(OSError, ValueError):
            state = json.loads((destination / STATE).read_text())
        if not overwrite and not state:
            raise CheckpointError(
                f"{destination} is not empty; give another folder, or --overwrite to replace what is there."
            )
        if not overwrite and {k: v for k, v in state.items() if k != "done"} == {
            k: v for k, v in fresh.items() if k != "done"
        }:
            return state
        if not overwrite:
            raise CheckpointError(
                f"{destination} holds an unfinished conversion of another source, or with other options;"
                " --overwrite starts again."
            )
        for old in destination.iterdir():
            if old.is_file() and (old.suffix in (".safetensors", ".tmp") or old.name in ("config.json", INDEX, STATE)):
                old.unlink()
    destination.mkdir(parents=True, exist_ok=True)
    return fresh


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    *,
    scale_dtype: str = "float32",
    overwrite: bool = False,
    verify: bool = True,
    progress: Progress | None = None,
) -> QuantizeReport:
    """Convert `source` into `destination`; goes on where an interrupted run stopped.

    Args:
        scale_dtype: "float32" keeps the scales exact (a model read from disk has the bits of one quantised while
            loading); "bfloat16" is what llm-compressor writes.
        overwrite: replace a checkpoint that is there.
        verify: read the result back and compare it with the source.
    Raises:
        CheckpointError: the source is damaged or not of a known kind, the disk is too small, the result is wrong.
        NonFiniteWeight: a weight holds NaN or infinity.
    """
    begin = time.monotonic()
    destination = Path(destination)
    plan = make_plan(source, scale_dtype)
    state = _prepare_destination(plan, destination, overwrite)
    done: dict[str, dict[str, int]] = state["done"]
    whole = {s for s, sizes in done.items() if (destination / s).is_file() and s in plan.shards and sizes}
    sizes = plan.bytes()
    scale_bytes = 4 if scale_dtype == "float32" else 2
    needed = sum(t.output_bytes(scale_bytes) for t in plan.tensors if t.shard not in whole)
    free = shutil.disk_usage(destination).free
    if needed > free:
        raise CheckpointError(f"{destination} has {free:,} bytes free, and the conversion writes {needed:,}.")
    _write_json(destination / STATE, state)

    passes = 2 if verify else 1
    total, finished = sizes["before"] * passes, 0

    def step(what: str) -> Callable[[Tensor], None]:
        def report(tensor: Tensor) -> None:
            nonlocal finished
            finished += tensor.nbytes
            if progress:
                progress(what, finished, total)

        return report

    for shard in plan.shards:
        if shard in whole:
            for tensor in plan.shards[shard]:
                step(f"{shard}: done before")(tensor)
            continue
        done[shard] = _convert_shard(plan, shard, destination / shard, step(f"quantise {shard}"))
        _return_memory()
        _write_json(destination / STATE, state)

    report = QuantizeReport(
        str(source), str(destination), sizes["before"], sizes["after"], sizes["experts_before"], sizes["experts_after"],
        expert_matrices=sum(n.endswith(".weight_scale") for names in done.values() for n in names),
        other_tensors=sum(t.expert is None for t in plan.tensors),
        shards=len(plan.shards),
        resumed_shards=sorted(whole),
    )  # fmt: skip
    if verify:
        report.worst_error = _verify(plan, destination, step)
        report.verified = True
    if (plan.source / INDEX).exists():
        weight_map = {name: shard for shard, names in done.items() for name in names}
        total_size = sum(n for names in done.values() for n in names.values())
        _write_json(
            destination / INDEX,
            {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
        )
    for file in sorted(plan.source.iterdir()):
        if (
            file.is_file()
            and file.suffix not in _NOT_COPIED
            and file.name not in ("config.json", INDEX)
            and not file.name.startswith(".")
        ):
            _write_whole(destination / file.name, lambda p, f=file: _copy(f, p))  # type: ignore[misc]
    _write_json(destination / "config.json", {**plan.config, "quantization_config": quantization_config(plan)})
    (destination / STATE).unlink()
    report.seconds = round(time.monotonic() - begin, 3)
    return report


def _copy(source: Path, target: Path) -> None:
    shutil.copyfile(source, target)


def _verify(plan: Plan, destination: Path, step: Callable[[str], Callable[[Tensor], None]]) -> float:
    """Read the result back; returns the worst error in steps. Every shard that is wrong is removed, so that a later
    run converts it again, and the first one's error raised."""
    worst, wrong = 0.0, []
    for shard in plan.shards:
        try:
            worst = max(worst, _verify_shard(plan, shard, destination / shard, step(f"verify {shard}")))
        except CheckpointError as error:
            (destination / shard).unlink(missing_ok=True)
            wrong.append(error)
    if wrong:
        raise wrong[0]
    return worst


def _verify_shard(plan: Plan, shard: str, result: Path, report: Callable[[Tensor], None]) -> float:
    """Every expert code within half a step of its weight, everything else equal byte for byte."""
    worst = 0.0
    # The scale itself may be rounded to bfloat16, which moves the largest weight of a row past the last code.
    bound, rounding = (0.5, 2**-22) if plan.scale_dtype == "float32" else (0.75, 2**-8)
    with _open(plan.source / shard) as before, _open(result) as after:
        names = set(after.keys())
        for tensor in plan.shards[shard]:
            if tensor.expert is None:
                if tensor.name not in names or not _same(before.get_tensor(tensor.name), after.get_tensor(tensor.name)):
                    raise CheckpointError(f"{result}: {tensor.name} differs from the source.")
                report(tensor)
                continue
            for name, matrix in _matrices(tensor, before.get_slice(tensor.name), plan.experts.num_experts):
                if not {f"{name}.weight", f"{name}.weight_scale"} <= names:
                    raise CheckpointError(f"{result}: {name} is missing.")
                q, scale = after.get_tensor(f"{name}.weight"), after.get_tensor(f"{name}.weight_scale").float()
                if q.dtype is not torch.int8 or q.shape != matrix.shape or scale.shape != (len(q), 1):
                    raise CheckpointError(f"{result}: {name} has the wrong dtype or shape.")
                # The scales are held to the source too: measured in steps of a wrong one, any error looks small.
                step_size = matrix.float().abs().amax(dim=-1, keepdim=True) / 127
                want = torch.where(step_size < torch.finfo(torch.float32).tiny, 1.0, step_size)
                if not torch.allclose(scale, want, rtol=rounding, atol=0.0):
                    raise CheckpointError(f"{result}: {name}.weight_scale is not max|w| / 127 of the source's rows.")
                error = float(((matrix.float() - q.float() * scale).abs() / scale).max())
                if not error <= bound * (1 + 1e-4):
                    raise CheckpointError(f"{result}: {name} is off by {error:.3g} steps, at most {bound} expected.")
                worst = max(worst, error)
            report(tensor)
    return worst


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal dtype, shape and bytes (NaN included)."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
