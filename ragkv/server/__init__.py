"""An HTTP server over indexes: OpenAI's protocol, and what watches over it. Needs the extra `serve`."""
