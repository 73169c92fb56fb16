"""lm-eval: local-completions over HTTP, on a task of its own; log-likelihoods as in process."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager
from setting import API_KEY, MODEL, V1, saw

os.environ["OPENAI_API_KEY"] = API_KEY
TASK = """
task: capitals
dataset_path: json
dataset_kwargs:
  data_files: {{test: {data}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: [" Paris", " Rome", " Lima"]
doc_to_target: label
metric_list:
  - metric: acc
"""
ROWS = [("France", 0), ("Italy", 1), ("Peru", 2)]

with tempfile.TemporaryDirectory() as folder:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(os.environ["LEYLINE_TOKENIZER"], name), folder)
    data = Path(folder, "rows.jsonl")
    data.write_text("\n".join(json.dumps({"country": c, "label": n}) for c, n in ROWS))
    Path(folder, "capitals.yaml").write_text(TASK.format(data=data))
    outcome = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": MODEL,
            "base_url": f"{V1}/completions",
            "tokenizer": folder,
            "tokenized_requests": True,
            "num_concurrent": 1,
            "max_retries": 1,
        },
        tasks=["capitals"],
        task_manager=TaskManager(include_path=folder, include_defaults=False),
        bootstrap_iters=0,
    )
accuracy = outcome["results"]["capitals"]["acc,none"]
saw(f"a task of three questions: accuracy {accuracy:.2f}", accuracy >= 2 / 3)
