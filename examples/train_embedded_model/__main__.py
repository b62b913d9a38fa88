"""Train the model that is embedded in session-server.

  python -m examples.train_embedded_model tokenizer --out retrained
  python -m examples.train_embedded_model train --out retrained --budget-s 4860
  python -m examples.train_embedded_model measure --model-dir retrained

Run it from the root of the repository. `tokenizer` writes the tokenizer and the chat template,
`train` trains weights for them, `measure` counts right answers. On a busy machine set
OMP_WAIT_POLICY=passive.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch

from examples.train_embedded_model import measure, tokenizer, train
from session_server.demo import MODEL_DIR


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_embedded_model",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="command", required=True)

    write = commands.add_parser("tokenizer", help="write the tokenizer and the chat template")
    write.add_argument("--out", type=Path, required=True, help="checkpoint directory")
    write.add_argument(
        "--exchanges", type=int, default=tokenizer.NUM_EXCHANGES, help="of the corpus"
    )

    learn = commands.add_parser("train", help="train weights for a tokenizer")
    learn.add_argument("--out", type=Path, required=True, help="directory that has the tokenizer")
    learn.add_argument("--budget-s", type=float, required=True, help="wall time to train for")
    learn.add_argument("--state", type=Path, help="file that keeps the run's state")
    learn.add_argument("--resume", action="store_true", help="continue from --state")
    learn.add_argument("--batch-tokens", type=int, default=4096, help="tokens per step")
    learn.add_argument("--seed", type=int, default=1, help="of the initial weights")

    judge = commands.add_parser("measure", help="count right answers of a checkpoint")
    judge.add_argument("--model-dir", type=Path, default=MODEL_DIR, help="checkpoint")
    judge.add_argument(
        "--history-lens", type=int, nargs="+", default=measure.HISTORY_LENS, help="tokens"
    )
    judge.add_argument("--probes", type=int, default=200, help="questions per history length")
    judge.add_argument("--dialogues", type=int, default=20, help="long ones, own history")
    judge.add_argument("--short-dialogues", type=int, default=200, help="own history")
    judge.add_argument("--first-seed", type=int, default=1_000_000, help="of the questions")
    judge.add_argument("--show-wrong", action="store_true", help="print the wrong answers")

    for each in (learn, judge):
        each.add_argument("--threads", type=int, default=2, help="default: %(default)s")
    args = parser.parse_args(argv)
    match args.command:
        case "tokenizer":
            tokenizer.write_tokenizer(args.out, num_exchanges=args.exchanges)
        case "train":
            _train(args)
        case _:
            _measure(args)


def _train(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    run = train.Run(tokenizer.ContentEncoder.load(args.out), args.batch_tokens)
    if args.resume:
        run.restore(args.state)
    for report in run.go(args.budget_s, args.state):
        print(report, flush=True)
    train.export(run.mean, args.out)


def _measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(args.threads)
    respondent, first = measure.Respondent(args.model_dir), args.first_seed
    wrong: list[measure.Spoken] = []

    print("recall after a true history")
    for number, length in enumerate(args.history_lens):
        seeds = range(first + number * args.probes, first + (number + 1) * args.probes)
        spoken = measure.recall_at(respondent, length, seeds)
        wrong += [turn for turn in spoken if not turn.is_right()]
        print(f"  {length:5d} tokens  {measure.score(spoken)}", flush=True)

    print("questions in long dialogues, own history")
    spoken = []
    for seed in range(first, first + args.dialogues):
        turns = measure.long_dialogue(respondent, seed, args.history_lens[-1])
        spoken += respondent.converse(turns)
    wrong += [turn for turn in spoken if not turn.is_right()]
    questions = [turn for turn in spoken if turn.exchange.kind == "ask"]
    for shorter, length in zip((0, *args.history_lens), args.history_lens, strict=False):
        within = [turn for turn in questions if shorter <= turn.history_len < length]
        print(f"  {shorter:5d} - {length:4d}  {measure.score(within)}")

    print("all turns of short dialogues, own history")
    spoken = []
    for seed in range(first, first + args.short_dialogues):
        spoken += respondent.converse(measure.short_dialogue(seed))
    wrong += [turn for turn in spoken if not turn.is_right()]
    print(f"  {measure.score(spoken)}")
    if args.show_wrong:
        for turn in wrong:
            print(f"  {turn.exchange.user!r} after {turn.history_len} tokens: {turn.answer!r}")


if __name__ == "__main__":
    main()
