"""The clients of musterd: Client for threads, AsyncClient for asyncio."""

from musterd.ipc.async_client import AsyncClient, AsyncTaskHandle
from musterd.ipc.sync_client import Client, TaskHandle

__all__ = ["AsyncClient", "AsyncTaskHandle", "Client", "TaskHandle"]
