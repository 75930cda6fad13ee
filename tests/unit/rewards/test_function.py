"""A reward in the user's file: what it may return, and what is said when it fails (C58, C32)."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest

from megappo.rewards.function import load_reward_function
from megappo.rewards.protocol import RewardError, RewardSample, Score


def samples(*responses: str) -> list[RewardSample]:
    """Samples of prompts 10, 11, ... with the given responses."""
    return [
        RewardSample(f"p{i}", text, {"want": i}, 10 + i, "stop", len(text))
        for i, text in enumerate(responses)
    ]


def write(folder: Path, code: str, name: str = "reward.py") -> Path:
    """A Python file with the given code."""
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(code))
    return path


def returning(folder: Path, expression: str, imports: str = "") -> str:
    """Path of a file whose reward function returns the expression (on line 3)."""
    code = f"{imports}\ndef reward_func(samples):\n    return {expression}\n"
    return str(write(folder, code))


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("[len(s.response) for s in samples]", [1.0, 2.0]),
        ("(True, 0.5)", [1.0, 0.5]),
        ("[s.label['want'] + s.prompt_id for s in samples]", [10.0, 12.0]),
        ("numpy.array([1, 2], dtype='float32')", [1.0, 2.0]),
        ("[numpy.float32(0.5), numpy.int64(3)]", [0.5, 3.0]),
        ("torch.tensor([1.0, -2.0])", [1.0, -2.0]),
        ("[torch.tensor(1.5), torch.tensor([2])]", [1.5, 2.0]),
    ],
)
def test_numbers(tmp_path: Path, expression: str, wanted: list[float]) -> None:
    """Numbers of any kind, in a list, a tuple, an array or a tensor."""
    reward = load_reward_function(returning(tmp_path, expression, "import numpy, torch"))
    assert reward(samples("a", "bc")) == [Score(value) for value in wanted]


def test_named_numbers(tmp_path: Path) -> None:
    """A dict gives the reward and named numbers; they may differ from sample to sample."""
    reward = load_reward_function(
        returning(tmp_path, "[{'reward': 1, 'short': True}, {'exact': 0.5, 'reward': 0}]")
    )
    assert reward(samples("a", "b")) == [Score(1.0, {"short": 1.0}), Score(0.0, {"exact": 0.5})]


def test_another_function_of_the_file(tmp_path: Path) -> None:
    """path.py:name takes the function of that name; a callable object will do."""
    path = write(
        tmp_path,
        """
        class Length:
            def __call__(self, samples):
                return [s.response_len for s in samples]

        length = Length()

        async def waits(samples):
            return [2.0 for _ in samples]
        """,
    )
    assert load_reward_function(f"{path}:length")(samples("abc")) == [Score(3.0)]
    assert load_reward_function(f"{path}:waits")(samples("abc")) == [Score(2.0)]


@pytest.mark.parametrize("responses", [("a", "", "b", "c"), ("", "", "", ""), ("",)])
def test_c32_empty_responses_are_asked(tmp_path: Path, responses: tuple[str, ...]) -> None:
    """An empty response is scored by the function like any other."""
    expression = "[-1.0 if not s.response else 1.0 for s in samples]"
    reward = load_reward_function(returning(tmp_path, expression))
    assert [s.reward for s in reward(samples(*responses))] == [
        1.0 if response else -1.0 for response in responses
    ]


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("[1, None, float('nan'), float('inf')]", "sample 1 (prompt 11): the reward is None,"),
        ("[1, 2, float('nan'), 4]", "sample 2 (prompt 12): the reward is nan,"),
        ("[1, 2, 3, float('inf')]", "sample 3 (prompt 13): the reward is inf,"),
        ("[-float('inf'), 2, 3, 4]", "sample 0 (prompt 10): the reward is -inf,"),
        ("[1, '0.5', 3, 4]", "sample 1 (prompt 11): the reward is '0.5',"),
        ("[1, [2], 3, 4]", "sample 1 (prompt 11): the reward is [2],"),
        ("[1, 2j, 3, 4]", "sample 1 (prompt 11): the reward is 2j,"),
        ("[1, 10**400, 3, 4]", "sample 1 (prompt 11): the reward is 1000000"),
        ("[1, numpy.ones(2), 3, 4]", "sample 1 (prompt 11): the reward is array([1., 1.]),"),
        ("[1, numpy.float32('nan'), 3, 4]", "sample 1 (prompt 11): the reward is "),
        ("[{'reward': 1}] * 3 + [{'reward': None}]", "sample 3 (prompt 13): 'reward' is None,"),
        ("[{'reward': 1, 'x': float('nan')}] * 4", "sample 0 (prompt 10): 'x' is nan,"),
        ("[{'score': 1}] * 4", "sample 0 (prompt 10): a dict without 'reward'; its fields: 'sc"),
        ("[{}] * 4", "its fields: none"),
        ("[1, 2, 3]", "returned 3 scores for 4 samples"),
        ("[1] * 5", "returned 5 scores for 4 samples"),
        ("[]", "returned 0 scores for 4 samples"),
        ("None", "returned a NoneType (None); wanted a list"),
        ("0.5", "returned a float (0.5); wanted a list"),
        ("{'rewards': [1, 2, 3, 4]}", "returned a dict ({'rewards': [1, 2, 3, 4]}); wanted a list"),
        ("(x for x in samples)", "returned a generator"),
        ("'abcd'", "returned a str"),
    ],
)
def test_c58_wrong_answers(tmp_path: Path, expression: str, wanted: str) -> None:
    """The error names the function, file and line, the sample, and the value, on one line."""
    path = returning(tmp_path, expression, "import numpy")
    with pytest.raises(RewardError) as caught:
        load_reward_function(path)(samples("a", "b", "c", "d"))
    message = str(caught.value)
    assert message.startswith(f"reward function reward_func ({path}:2)")
    assert wanted in message and "\n" not in message and len(message) < 500


@pytest.mark.parametrize(
    ("statement", "wanted"),
    [
        ("raise KeyError('answer')", "KeyError: 'answer'"),
        ("raise ValueError('two\\nlines')", "ValueError: two lines"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit(3)", "SystemExit: 3"),
        ("json.loads('{')", "JSONDecodeError: Expecting property name"),
    ],
)
@pytest.mark.parametrize("keyword", ["def", "async def"])
def test_c58_exceptions(tmp_path: Path, statement: str, wanted: str, keyword: str) -> None:
    """An exception keeps its type and text, and the line of the user's file it came from."""
    path = write(
        tmp_path,
        f"""
        import json
        {keyword} reward_func(samples):
            for i, sample in enumerate(samples):
                if i == 2:
                    {statement}
            return [0] * len(samples)
        """,
    )
    with pytest.raises(RewardError) as caught:
        load_reward_function(str(path))(samples("a", "b", "c"))
    assert f"reward_func ({path}:6) raised {wanted}" in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.__cause__ is not None


def test_missing_file_or_name(tmp_path: Path) -> None:
    """What is missing is one line that names the key and what there is."""
    path = write(tmp_path, "def score(samples): ...\ndef _hidden(): ...\nNUMBER = 3\n")
    for spec, wanted in [
        (str(tmp_path / "none.py"), "no file .*none.py; wanted path.py or path.py:name"),
        (str(tmp_path), "no file"),
        ("", "no file"),
        (f"{path}", "has no function 'reward_func'; it has: score"),
        (f"{path}:other", "has no function 'other'; it has: score"),
        (f"{path}:NUMBER", "has no function 'NUMBER'; it has: score"),
        (f"{path}:not-a-name", "no file"),
    ]:
        with pytest.raises(ValueError, match=f"reward.remote_url = .*{wanted}") as caught:
            load_reward_function(spec)
        assert "\n" not in str(caught.value)
    text = write(tmp_path, "x", name="reward.txt")
    with pytest.raises(ValueError, match="reward.txt is not a Python file"):
        load_reward_function(str(text))


@pytest.mark.parametrize(
    ("code", "wanted"),
    [
        ("\nimport not_there_at_all\n", ":2 cannot be imported: ModuleNotFoundError: No module"),
        ("\n\ndef reward_func(samples)\n", ":3 cannot be imported: SyntaxError: expected ':'"),
        ("x = 1\nraise RuntimeError('at import')\n", ":2 cannot be imported: RuntimeError: at imp"),
        ("import sys\n\nsys.exit('bye')", ":3 cannot be imported: SystemExit: bye"),
    ],
)
def test_import_errors(tmp_path: Path, code: str, wanted: str) -> None:
    """A file that cannot be imported is one line with the line at fault; nothing stays behind."""
    path = write(tmp_path, code)
    before = set(sys.modules)
    with pytest.raises(ValueError) as caught:
        load_reward_function(str(path))
    assert f"reward file {path}{wanted}" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not {name for name in set(sys.modules) - before if "reward" in name}


@pytest.mark.parametrize("signature", ["()", "(queries, prompts, labels)", "(*, samples)"])
def test_wrong_signature(tmp_path: Path, signature: str) -> None:
    """A function that cannot take the samples as its one argument is refused when loaded."""
    path = write(tmp_path, f"def reward_func{signature}:\n    return []\n")
    with pytest.raises(ValueError, match=r"reward_func \(.*:1\) must take one argument"):
        load_reward_function(str(path))


def test_siblings_are_found_and_do_not_stay(tmp_path: Path) -> None:
    """Each file sees the modules beside it, at import and at call time, and nobody else does."""
    for number in (1, 2):
        folder = tmp_path / f"task{number}"
        write(folder, f"VALUE = {number}\n", name="rules.py")
        write(folder, f"VALUE = {10 * number}\n", name="lazy_rules.py")
        write(folder, "CALLS = []\n", name="pack/inner.py")
        write(
            folder,
            """
            from dataclasses import dataclass
            import rules
            import pack.inner

            @dataclass
            class Parts:
                base: "float"

            def reward_func(samples):
                import lazy_rules
                pack.inner.CALLS.append(1)
                return [Parts(rules.VALUE + lazy_rules.VALUE).base + len(pack.inner.CALLS)]
            """,
        )
    before, path_before = set(sys.modules), list(sys.path)
    first = load_reward_function(str(tmp_path / "task1" / "reward.py"))
    second = load_reward_function(str(tmp_path / "task2" / "reward.py"))
    for calls in (1, 2):
        assert first(samples("a")) == [Score(11.0 + calls)]
        assert second(samples("a")) == [Score(22.0 + calls)]
    assert sys.path == path_before
    left = set(sys.modules) - before
    assert not left & {"rules", "lazy_rules", "pack", "pack.inner", "reward"}
    assert len([name for name in left if name.startswith("megappo_reward_")]) == 2


def test_a_sibling_with_the_name_of_a_loaded_module(tmp_path: Path) -> None:
    """A module that the program has loaded is not replaced by the user's of that name."""
    write(tmp_path, "raise RuntimeError('never')\n", name="json.py")
    own = sys.modules["json"]
    path = returning(tmp_path, "[json.loads(s.response) for s in samples]", "import json")
    assert load_reward_function(path)(samples("1.5")) == [Score(1.5)]
    assert sys.modules["json"] is own


def test_what_lies_deeper_or_was_loaded_before_stays_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A virtual environment below the folder, and the program's own packages, are no siblings."""
    site = tmp_path / ".venv" / "site-packages"
    write(site, "", name="vendor_of_test/__init__.py")
    write(site, "", name="vendor_of_test/lazy.py")
    write(tmp_path, "", name="program_of_test/__init__.py")
    write(tmp_path, "", name="program_of_test/lazy.py")
    monkeypatch.syspath_prepend(site)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("program_of_test")
    path = returning(tmp_path, "[1]", "import vendor_of_test.lazy, program_of_test.lazy, json")
    load_reward_function(path)(samples("a"))
    for package in ("vendor_of_test", "program_of_test"):
        assert sys.modules.pop(f"{package}.lazy") and sys.modules.pop(package)
