"""`magicdec serve`: an HTTP server with the API of OpenAI."""
