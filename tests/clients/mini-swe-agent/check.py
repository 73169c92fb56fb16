"""mini-swe-agent: its loop with one bash tool, to the end.

The embedded model is too small to solve anything, so its reply is prescribed by a structured
output: what is seen is the loop, the tool call and its result.
"""

import os
import tempfile

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from setting import API_KEY, MODEL, V1, saw

CALL = (
    '<tool_call>\n{"name": "bash", "arguments": '
    '{"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo done"}}\n</tool_call>'
)
model = LitellmModel(
    model_name=f"openai/{MODEL}",
    model_kwargs={
        "api_base": V1,
        "api_key": API_KEY,
        "temperature": 0,
        "extra_body": {"structured_outputs": {"choice": [CALL]}},
    },
)
with tempfile.TemporaryDirectory() as folder:
    agent = DefaultAgent(
        model,
        LocalEnvironment(cwd=folder),
        system_template="You are a helpful assistant.",
        instance_template="Please solve this: {{task}}",
        step_limit=3,
        cost_limit=0,
    )
    result = agent.run("Say that you are done.")
saw("a run that ended in Submitted", result["exit_status"] == "Submitted")
