"""Train the shipped model: a small Qwen3-MoE on US presidents' annual messages.

    python training/train.py --data .data --out .data/model

Weights are bf16 with float32 masters in the optimiser. Eleven megabytes of text are few for 6.8 M parameters, so what
limits quality is over-fitting: residual dropout (by hooks that exist only while training) and BPE dropout (each epoch
is tokenised anew) are the regularisers. `--runs` trains one model for each `dropout:bpe_dropout` pair and keeps the one
with the lowest validation loss.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

CONTEXT = 512


def make_config(vocab: int, eos: int) -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=192, num_hidden_layers=5, num_attention_heads=6, num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=128, intermediate_size=512, num_experts=16, num_experts_per_tok=4, norm_topk_prob=True,
        decoder_sparse_step=1, mlp_only_layers=[], max_position_embeddings=CONTEXT, rope_theta=10000.0,
        tie_word_embeddings=True,
        output_router_logits=False, router_aux_loss_coef=0.01, bos_token_id=eos, eos_token_id=eos, pad_token_id=eos,
        initializer_range=0.02,
    )  # fmt: skip


def add_dropout(model: Qwen3MoeForCausalLM, p: float) -> None:
    """Residual and embedding dropout while training; hooks, so the saved model is a plain Qwen3-MoE."""

    def hook(module, inputs, output):
        if not module.training:
            return output
        if isinstance(output, tuple):
            return (F.dropout(output[0], p), *output[1:])
        return F.dropout(output, p)

    model.model.embed_tokens.register_forward_hook(hook)
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(hook)
        layer.mlp.register_forward_hook(hook)


def prefetched(tokenizer: Tokenizer, docs: list[str], eos: int, dropout: float, seed: int):
    """Endless epochs of freshly shuffled and tokenised (BPE dropout) documents, the next one made in a thread."""
    from concurrent.futures import ThreadPoolExecutor

    own, g = Tokenizer.from_str(tokenizer.to_str()), torch.Generator().manual_seed(seed)
    make = lambda order: encode(own, [docs[i] for i in order], eos, dropout)
    with ThreadPoolExecutor(1) as pool:
        ahead = pool.submit(make, torch.randperm(len(docs), generator=g).tolist())
        while True:
            ids = ahead.result()
            ahead = pool.submit(make, torch.randperm(len(docs), generator=g).tolist())
            yield ids


def encode(tokenizer: Tokenizer, documents: list[str], eos: int, dropout: float | None) -> torch.Tensor:
    tokenizer.model.dropout = dropout
    ids: list[int] = []
    for e in tokenizer.encode_batch(documents):
        ids += [*e.ids, eos]
    tokenizer.model.dropout = None
    return torch.tensor(ids, dtype=torch.long)


@torch.no_grad()
def loss_on(model, ids: torch.Tensor, device: str, batch: int = 32) -> float:
    model.eval()
    n = (len(ids) - 1) // CONTEXT
    x = ids[: n * CONTEXT].view(n, CONTEXT)
    y = ids[1 : n * CONTEXT + 1].view(n, CONTEXT)
    total = 0.0
    for i in range(0, n, batch):
        logits = model(input_ids=x[i : i + batch].to(device), use_cache=False).logits.float()
        total += F.cross_entropy(logits.flatten(0, 1), y[i : i + batch].to(device).flatten(), reduction="sum").item()
    model.train()
    return total / (n * CONTEXT)


def train(args, tokenizer, docs, valid, heldout, p_drop, bpe_drop, seed, steps, log):
    torch.manual_seed(seed)
    device, eos = args.device, tokenizer.token_to_id("<|endoftext|>")
    model = Qwen3MoeForCausalLM(make_config(tokenizer.get_vocab_size(), eos)).to(device, torch.float32)
    master = [p.detach().clone().float() for p in model.parameters()]
    for m in master:
        m.requires_grad_(True)
    model = model.to(torch.bfloat16)
    params = list(model.parameters())
    decay = [m for m in master if m.dim() >= 2]
    other = [m for m in master if m.dim() < 2]
    opt = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": other, "weight_decay": 0.0}], lr=args.lr, betas=(0.9, 0.95),
        fused=device == "cuda",
    )  # fmt: skip
    add_dropout(model, p_drop)
    model.train()
    g = torch.Generator().manual_seed(seed)
    data, epoch, best, best_state, t0 = None, -1, 1e9, None, time.time()
    per_epoch = None
    epochs = prefetched(tokenizer, docs, eos, bpe_drop, seed)
    for step in range(steps):
        if data is None or (step // per_epoch) != epoch:
            ids = next(epochs)
            data = ids.to(device)
            per_epoch = max(1, len(ids) // (args.batch * CONTEXT))
            epoch = step // per_epoch
        lr = args.lr * min(1, (step + 1) / 100) * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * step / steps)))
        for group in opt.param_groups:
            group["lr"] = lr
        at = torch.randint(0, len(data) - CONTEXT - 1, (args.batch,), generator=g)
        index = (at[:, None] + torch.arange(CONTEXT + 1)[None]).to(device)
        tokens = data[index]
        out = model(input_ids=tokens[:, :-1], use_cache=False, output_router_logits=True)
        loss = F.cross_entropy(out.logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        aux = out.aux_loss if out.aux_loss is not None else 0.0
        (loss + 0.01 * aux).backward()
        with torch.no_grad():
            grads = [p.grad.float() for p in params]
            norm = torch.sqrt(sum(x.square().sum() for x in grads))
            scale = 1.0 / norm.clamp_min(1.0)
            for m, x in zip(master, grads, strict=True):
                m.grad = x * scale
        opt.step()
        with torch.no_grad():
            for p, m in zip(params, master, strict=True):
                p.copy_(m)
                p.grad = None
        if step % args.eval_every == 0 or step == steps - 1:
            v = loss_on(model, valid, device)
            row = {
                "step": step,
                "tokens": (step + 1) * args.batch * CONTEXT,
                "epoch": round(step / per_epoch, 2),
                "train": round(loss.item(), 4),
                "valid": round(v, 4),
                "seconds": round(time.time() - t0, 1),
            }
            log.append(row)
            print(p_drop, bpe_drop, row, flush=True)
            if v < best:
                best, best_state = v, {k: t.detach().clone() for k, t in model.state_dict().items()}
            if time.time() - args.start > args.minutes * 60:
                print("time is up", flush=True)
                break
    model.load_state_dict(best_state)
    model.eval()
    h = loss_on(model, heldout, device)
    print("best valid", best, "heldout", h, "ppl", math.exp(h), flush=True)
    return model, best, h


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", type=Path, required=True)
    ap.add_argument("--out", type=Path, required=True)
    ap.add_argument("--minutes", type=float, default=7.5)
    ap.add_argument("--device", default="cuda")
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=2e-3)
    ap.add_argument("--steps", type=int, default=4000)
    ap.add_argument("--eval-every", type=int, default=250)
    ap.add_argument("--runs", default="0.1:0.1,0.2:0.1,0.1:0.05")
    args = ap.parse_args()
    args.start = time.time()
    args.out.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    eos = tokenizer.token_to_id("<|endoftext|>")
    docs = (args.data / "train.txt").read_text().split("\x00")
    valid = encode(tokenizer, (args.data / "valid.txt").read_text().split("\x00"), eos, None)
    heldout = encode(tokenizer, (args.data / "heldout_all.txt").read_text().split("\x00"), eos, None)
    print(len(docs), "documents", len(valid), "validation tokens", len(heldout), "held-out tokens", flush=True)
    best, logs = 1e9, {}
    for run in args.runs.split(","):
        if logs and time.time() - args.start > args.minutes * 60 * 0.75:
            break
        p_drop, bpe_drop = map(float, run.split(":"))
        log: list[dict] = []
        model, v, h = train(args, tokenizer, docs, valid, heldout, p_drop, bpe_drop, 0, args.steps, log)
        logs[run] = dict(log=log, valid=v, heldout=h)
        (args.out / "training_log.json").write_text(json.dumps(logs))
        if v < best:
            best = v
            model.save_pretrained(args.out, safe_serialization=True)
            count = sum(p.numel() for p in model.parameters())
            chosen = {"run": run, "valid": v, "heldout": h, "params": count, "torch": torch.__version__}
            (args.out / "chosen.json").write_text(json.dumps(chosen))
            lines = []
            for prompt in ("The people of the United States", "During the past year", "I recommend that Congress"):
                ids = torch.tensor([tokenizer.encode(prompt).ids], device=args.device)
                for kw in (dict(do_sample=False), dict(do_sample=True, temperature=0.8, top_k=50)):
                    try:
                        text = tokenizer.decode(model.generate(ids, max_new_tokens=120, **kw)[0].tolist())
                        lines.append(text)
                    except Exception as e:
                        lines.append(repr(e))
            (args.out / "samples.txt").write_text("\n----\n".join(lines))
            print("\n----\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
