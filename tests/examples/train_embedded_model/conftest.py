"""The shipped checkpoint's tokenizer, read once, and a quiet torch."""

from collections.abc import Iterator

import pytest
import torch

from examples.train_embedded_model.tokenizer import ContentEncoder
from session_server.demo import MODEL_DIR


@pytest.fixture(scope="session")
def encoder() -> ContentEncoder:
    return ContentEncoder.load(MODEL_DIR)


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Matrices this small gain nothing from threads, which suffer on a busy machine."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)
