"""The wire formats of the OpenAI, Anthropic and SGLang APIs, without I/O: requests, responses, stream events and
errors."""
