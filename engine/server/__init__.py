"""An HTTP server with OpenAI's interface over ``AsyncLLM``: ``app.make_app``, ``running.serve``.

The only folder that needs the extra ``serve``: FastAPI and uvicorn.
"""
