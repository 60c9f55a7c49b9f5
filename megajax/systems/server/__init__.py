"""An HTTP server for one engine, with the interface of OpenAI's completions and chats."""
