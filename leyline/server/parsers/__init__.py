"""From a reply's text to reasoning, content and tool calls, for each family of models."""
