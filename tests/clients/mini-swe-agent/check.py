"""mini-swe-agent: its loop to the end, with commands in the text and with its bash tool.

The embedded model is too small to solve anything. In the first run its reply is prescribed by a
structured output, so that the loop ends as it should; in the second it calls the tool as it likes.
"""

import os
import tempfile

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel
from minisweagent.models.litellm_textbased_model import LitellmTextbasedModel
from setting import API_KEY, MODEL, V1, saw

DONE = "```mswea_bash_command\necho COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\n```"
WHERE = {"api_base": V1, "api_key": API_KEY, "temperature": 0, "max_tokens": 100}


class Still(LocalEnvironment):
    """An environment in which nothing that a model makes up is run."""

    def execute(self, action, *args, **kwargs):
        if action.get("command") == "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT":
            return super().execute(action, *args, **kwargs)
        return {"output": "not run", "returncode": 0, "exception_info": ""}


def run(model):
    """A short run; its exit status, and what was said."""
    with tempfile.TemporaryDirectory() as folder:
        agent = DefaultAgent(
            model,
            Still(cwd=folder, timeout=5),
            system_template="You are a helpful assistant.",
            instance_template="Please solve this: {{task}}",
            step_limit=2,
            cost_limit=0,
        )
        return agent.run("Say that you are done.")["exit_status"], agent.messages


form = {"structured_outputs": {"choice": [DONE]}}
text = LitellmTextbasedModel(
    model_name=f"openai/{MODEL}", model_kwargs=WHERE | {"extra_body": form}
)
saw("a run that ended in Submitted", run(text)[0] == "Submitted")
required = {"tool_choice": "required", "parallel_tool_calls": False}
tool = LitellmModel(model_name=f"openai/{MODEL}", model_kwargs=WHERE | required)
_, messages = run(tool)
saw("calls of its bash tool, and their results", any(m["role"] == "tool" for m in messages))
