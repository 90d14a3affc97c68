from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--rewrite-golden", action="store_true", help="write the transcripts anew, for review with git diff"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest):
    """Compares a text with the file of this name, or writes it."""

    def check(name: str, text: str) -> None:
        path = Path(__file__).parent / "decisions" / f"{name}.txt"
        if request.config.getoption("--rewrite-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path} is missing: run pytest --rewrite-golden"
        assert text == path.read_text(encoding="utf-8"), "the decision changed: if it is right, pytest --rewrite-golden"

    return check
