"""From a reply's text to reasoning, content and tool calls; begin with `choosing.choose`."""
