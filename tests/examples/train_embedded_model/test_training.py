"""The training script: its schedule, its loss positions, its optimiser and resuming."""

import re
from pathlib import Path

import pytest
import torch

from examples.train_embedded_model import tokenizer, train
from examples.train_embedded_model.__main__ import main
from examples.train_embedded_model.batches import BatchMaker
from examples.train_embedded_model.measure import Respondent
from examples.train_embedded_model.muon import Muon, orthogonalized
from examples.train_embedded_model.tokenizer import ContentEncoder
from session_server.demo import MODEL_DIR


def test_loss_falls_on_answers_and_their_ends_only(encoder: ContentEncoder) -> None:
    batch = BatchMaker(encoder, first_row=0).make(num_rows=4, length=200)
    for row, chosen in zip(batch.token_ids.tolist(), batch.chosen.tolist(), strict=True):
        inside = False
        for position, token_id in enumerate(row[:-1]):
            inside = token_id == tokenizer.ASSISTANT_ID or (inside and token_id != tokenizer.END_ID)
            # The last answer may be too short to be scored, where the row ends.
            assert chosen[position] == inside or position > 150


def test_labels_are_the_tokens_that_follow(encoder: ContentEncoder) -> None:
    batch = BatchMaker(encoder, first_row=0).make(num_rows=2, length=100)
    following = batch.token_ids.roll(-1, dims=1)[batch.chosen]
    assert torch.equal(batch.labels, following)


def test_shares_right_count_whole_answers(encoder: ContentEncoder) -> None:
    batch = BatchMaker(encoder, first_row=0).make(num_rows=2, length=100)
    perfect = torch.nn.functional.one_hot(batch.labels, 1536).float()
    assert batch.shares_right(perfect) == (1.0, 1.0)
    perfect[0] = 0
    perfect[0, tokenizer.PADDING_ID] = 1
    assert batch.shares_right(perfect)[1] == pytest.approx(1 - 1 / len(batch.is_ask))


def test_rows_do_not_repeat_after_resuming(encoder: ContentEncoder) -> None:
    straight = BatchMaker(encoder, first_row=0).make(num_rows=3, length=64)
    resumed = BatchMaker(encoder, first_row=2).make(num_rows=1, length=64)
    assert torch.equal(straight.token_ids[2:], resumed.token_ids)


def test_lengths_and_rates_follow_the_elapsed_share() -> None:
    assert [train.length_at(share) for share in (0, 0.2, 0.4, 0.6, 0.8, 1.0)] == [
        96, 256, 512, 1024, 2048, 4096,
    ]  # fmt: skip
    assert train.rate_at(0, 0.0) == pytest.approx(1 / train.WARM_UP_STEPS)
    assert train.rate_at(1000, train.FLAT_SHARE) == 1.0
    assert train.rate_at(1000, 1.0) == pytest.approx(train.FINAL_RATE)


def test_orthogonalized_brings_singular_values_near_one() -> None:
    torch.manual_seed(0)
    values = torch.linalg.svdvals(orthogonalized(torch.randn(3, 16, 48)))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_muon_moves_tall_and_wide_matrices_alike() -> None:
    torch.manual_seed(0)
    wide = torch.zeros(8, 24, requires_grad=True)
    tall = torch.zeros(24, 8, requires_grad=True)
    wide.grad = torch.randn(8, 24)
    tall.grad = wide.grad.T.clone()
    Muon([wide, tall]).step(learning_rate=0.1)
    torch.testing.assert_close(wide * 3**0.5, tall.T)
    assert wide.grad is None


def test_a_run_resumes_where_it_stopped(encoder: ContentEncoder, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = tmp_path / "state.safetensors"
    run = train.Run(encoder, batch_tokens=512)
    reports = list(run.go(0.5, state))
    assert "recall" in reports[-1]  # A finished run has reported its end.
    resumed = train.Run(encoder, batch_tokens=512)
    resumed.restore(state)
    assert resumed.progress == run.progress
    for mine, theirs in zip(resumed.mean.parameters(), run.mean.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    # The optimisers go on too: the next step from either is the same one.
    batch = BatchMaker(encoder, run.progress.num_rows).make(num_rows=2, length=96)
    assert run.learn(batch, rate=0.5) == resumed.learn(batch, rate=0.5)
    for mine, theirs in zip(resumed.network.parameters(), run.network.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    list(resumed.go(run.progress.elapsed_s + 0.2, None))
    assert resumed.progress.step > run.progress.step


def test_steps_lower_the_loss(encoder: ContentEncoder) -> None:
    torch.manual_seed(0)
    run = train.Run(encoder, batch_tokens=960)
    maker = BatchMaker(encoder, first_row=0)
    losses = [run.learn(maker.make(num_rows=10, length=96), rate=0.3)[0] for _ in range(12)]
    assert losses[-1] < losses[0] - 1


def test_the_documented_commands_make_a_checkpoint_and_measure_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = str(tmp_path)
    main(["tokenizer", "--out", out, "--exchanges", "2000"])
    for name in ("tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / name).read_text() == (MODEL_DIR / name).read_text()
    main(["train", "--out", out, "--budget-s", "0.1", "--batch-tokens", "96", "--threads", "1"])
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / name).read_text() == (MODEL_DIR / name).read_text()
    retrained = Respondent(tmp_path)
    assert retrained.encoder.decode(retrained.encoder.encode("Oslo. é")) == "Oslo. é"
    capsys.readouterr()
    few = ["--history-lens", "128", "--probes", "3", "--dialogues", "1", "--short-dialogues", "2"]
    main(["measure", *few, "--threads", "1", "--show-wrong"])
    said = capsys.readouterr().out
    assert "128 tokens  1.0000  of 3" in said
    assert re.search(r"0 -  128  1.0000  of \d", said)
