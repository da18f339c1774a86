"""The HTTP server for indexes: OpenAI's protocol, ragkv's own API and the web page. Needs the extra `serve`."""
