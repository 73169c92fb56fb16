"""docs/known-bugs.md names a test, or a reason, for every report of our list; and the tests are."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "known-bugs.md"
REPORTS = {
    # The OpenAI surface.
    1: "vllm #3574; TGI #1254; SharpAI/SwiftLM #126, #133; mzau/mlx-knife #68",
    2: "smg-project/smg PR 2203",
    3: "LostRuins/koboldcpp PR 1031",
    4: "vllm PR 45636",
    5: (
        "antonellof/ferrox #124; exo-explore/exo PR 1691; Luce-Org/lucebox PR 641; "
        "mlc-ai/mlc-llm PR 1142"
    ),
    6: "ai-dynamo/dynamo #12630",
    7: "Blaizzy/mlx-vlm #1771, PR 1778",
    8: "turboderp-org/exllamav3 #171",
    9: "sgl-project/sglang #954, #3743; TheTom/vllm-swift #19; vllm #6083, #7299",
    10: "can1357/oh-my-pi #5022",
    11: "sglang #10012",
    12: "waybarrios/vllm-mlx #628",
    14: "vllm #37937",
    15: "Blaizzy/mlx-vlm PR 1215",
    16: "vllm #24184",
    17: "vllm PR 4529",
    18: "vllm #3341",
    19: "vllm #10432",
    20: "vllm #1543, #6707; claude-code-best/claude-code #340; lm-sys/FastChat PR 2544",
    21: "vllm-project/vllm-omni PR 6598",
    22: (
        "NousResearch/hermes-agent PR 84281; Aider-AI/aider #3693; MoonshotAI/kimi-cli "
        "#994; volcengine/OpenViking #4238"
    ),
    23: "vllm #21089",
    24: "0xPlaygrounds/rig #1362",
    25: (
        "TGI PR 3021; lmstudio-bug-tracker #261; mistralai/mistral-common #324; "
        "openai-agents-python PR 2238; llama-cpp-python PR 1807"
    ),
    26: "cubist38/mlx-openai-server PR 205",
    27: "CommandCodeAI/command-code #820",
    28: "sglang #5984; dphnAI/sonar #183; mlx-omni-server PR 56; lmdeploy PR 1985",
    29: "vllm #4795",
    30: "vllm #17421, PR 17637",
    31: "llama-cpp-python #1787",
    32: "ollama #16117",
    33: "vllm #10234",
    34: "langchain4j #1958; openai-agents-python #2237",
    # Calls, templates and tokens.
    35: "vllm #9693, #10395, PR 10398",
    36: "vllm #10781",
    37: "vllm PR 48852",
    38: "vllm #47907",
    39: "openai/codex #7517; vllm #18412",
    40: "vllm #42696",
    41: "agno-agi/agno #8879, PR 8880",
    44: "sglang PR 39632, #36748",
    45: "vllm PR 48367",
    46: "tt-inference-server #3683",
    47: "vllm #50768",
    48: "MoonshotAI/Kimi-K2 #26; vllm #24478; llama.cpp PR 17376",
    49: "fw-ai-external/python-sdk #119",
    50: "unslothai/unsloth PR 5624 review",
    51: "vllm #42878, #52846",
    52: (
        "deepseek-ai/DeepSeek-R1 #151; DeepSeek-Coder-V2 #50; vllm #27486, PR 27515; "
        "llama-cpp-python #1501; Soup #781"
    ),
    53: "noonghunna/club-3090 #1250",
    54: "raullenchai/Rapid-MLX #214; QwenLM/Qwen3.8 #131",
    55: "PrimeIntellect-ai/prime-rl PR 1863; generative-computing/mellea PR 1592",
    56: "NVIDIA/TensorRT-LLM PR 18389",
    # Scheduling, hanging up, shutting down.
    87: "sglang #2255",
    88: "sglang #36855",
    89: "vllm #3032, PR 5349; vllm-gaudi PR 541; vllm #16832",
    90: "vllm PR 29071",
    91: "vllm-omni PR 6053",
    92: "sglang #37833",
    94: "ROCm/ATOM PR 1441, 1562, 1589; vllm #9428; vllm code comment on disconnect",
    95: "vllm #24885, PR 36666, PR 36258; litellm PR 29439",
    96: "vllm #37076, #39146",
    97: "llama.cpp #21831",
    # Forms.
    127: "vllm #17313, #17248, PR 17623; TGI #2280",
    129: "vllm #43920",
    130: "vllm #54003",
    131: "xgrammar 0.2.9 (seen in our own run)",
    # Security.
    132: "CVE-2026-34756, GHSA-3mwp-wvh9-7528 (vLLM <0.19)",
    134: "CVE-2025-48956 (vLLM <0.10.1.1)",
    135: "CVE-2025-48944 (vLLM 0.8)",
    136: "GHSA-mgrm-fgjv-mhv8, CVE-2025-29770",
    137: "CVE-2025-59425 (vLLM <0.11)",
    139: "GHSA-rx2h-752g-w9w4, vllm PR 35160; vLLM CORS default now empty",
    140: "CVE-2025-25183, GHSA-rm76-4mrf-v9r8, vllm PR 12621, PR 15297, PR 54727",
    141: "CVE-2025-46570, GHSA-4qjh-9fv9-r85r, vllm PR 17045, PR 39082",
    142: "CVE-2026-5760 (SGLang, CVSS 9.8)",
    143: (
        "CVE-2026-3059, -3060, -3989, -7301 (SGLang); CVE-2024-50050 and the ShadowMQ "
        "family (vLLM, TensorRT-LLM and others)"
    ),
    144: "CVE-2026-22807, GHSA-2pc9-4j83-qjmr (vLLM 0.10.1-0.13); CVE-2025-66448",
    146: "CVE-2026-7482 (Ollama <0.17.1)",
    147: "llama.cpp #26315, PR 26316",
    148: "waybarrios/vllm-mlx #68, PR 70",
    149: "vllm #23052; exposure reports on Ollama (about 175k-300k open hosts in 2026)",
    150: "vLLM 0.5.4 empty prompt crash (CVE-2024-8768)",
    151: "CVE-2026-9540 (vLLM 0.19)",
    152: "CVE-2025-6242; CVE-2026-33626 (LMDeploy, exploited within 13 hours)",
    153: "CVE-2024-37032 (Ollama); log forging in request ids, model names, user fields",
    # Clients and tools.
    154: "openai/codex discussion 7782; webai-at-home #214; seen here with codex 0.171",
    155: "ik_llama.cpp PR 1964; seen here",
    156: "seen here: guidellm 0.8.1",
    157: "seen here: langchain-openai 1.7",
    158: "seen here: smolagents, qwen-code, pi",
    159: "seen here: claude-code, opencode, codex",
}
TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")


def rows(text: str) -> dict[int, tuple[str, str, str]]:
    """Report, kind and place of every row of the page's tables, by its number."""
    found: dict[int, tuple[str, str, str]] = {}
    for line in re.findall(r"^\| (\d+ \|.*) \|$", text, re.MULTILINE):
        number, report, kind, here = line.split(" | ")
        assert int(number) not in found
        found[int(number)] = (report, kind, here)
    return found


@cache
def named_in(file: str) -> frozenset[str]:
    """Names of the tests in a file; none if there is no such file."""
    path = TESTS / file
    if not path.is_file():
        return frozenset()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(one.name for one in tree.body if isinstance(one, kinds))


def missing(here: str) -> list[str]:
    """Tests that a place names and that are not there."""
    named = TEST.findall(here)
    return [f"{file}::{name}" for file, name in named if name not in named_in(file)]


PAGE_ROWS = rows(PAGE.read_text(encoding="utf-8"))


@pytest.mark.parametrize("number", REPORTS)
def test_every_report_has_a_row_with_a_test_or_a_reason(number: int) -> None:
    report, kind, here = PAGE_ROWS[number]
    assert report == REPORTS[number]
    assert 3 <= len(kind.split()) <= 12
    assert TEST.search(here) or here.startswith("cannot occur: ")
    assert missing(here) == []


def test_there_is_no_row_of_an_unknown_report() -> None:
    assert PAGE_ROWS.keys() == REPORTS.keys()


def test_its_links_lead_somewhere() -> None:
    for link in re.findall(r"\]\(([^)#]+)", PAGE.read_text(encoding="utf-8")):
        assert (PAGE.parent / link).is_file(), link


def test_a_row_without_its_test_is_noticed() -> None:
    assert missing("`server/test_known_bugs.py::test_that_nobody_wrote`")
    assert missing("`server/test_nowhere.py::test_row_1_a_stop_string_over_token_borders`")
    assert not missing("`server/test_known_bugs.py::test_row_1_a_stop_string_over_token_borders`")
