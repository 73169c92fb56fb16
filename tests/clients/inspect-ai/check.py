"""Inspect: an evaluation of one question, with usage."""

import os

from setting import API_KEY, MODEL, V1, saw

os.environ |= {"LEYLINE_BASE_URL": V1, "LEYLINE_API_KEY": API_KEY, "INSPECT_LOG_DIR": os.devnull}

import tempfile

from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

task = Task(
    dataset=[Sample(input="What is the capital of France?", target="Paris")],
    solver=generate(),
    scorer=includes(),
)
with tempfile.TemporaryDirectory() as folder:
    (log,) = eval(
        task,
        model=f"openai-api/leyline/{MODEL}",
        temperature=0,
        max_tokens=20,
        log_dir=folder,
        display="none",
    )
saw("an evaluation", log.status == "success")
saw("accuracy 1.0", log.results.scores[0].metrics["accuracy"].value == 1.0)
