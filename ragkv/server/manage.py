"""The routes below `/api` that change an index: documents come and go, and jobs ingest them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import quote

from fastapi import APIRouter, Request
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from ragkv.errors import StoreBusyError
from ragkv.ingest import Limits, SourceFile, supplied
from ragkv.server.failure import Refusal
from ragkv.server.ingestjob import IngestJob, JobFacts
from ragkv.server.jobdesk import JobDesk, watch
from ragkv.server.served import Served
from ragkv.server.upload import Received, receive_files
from ragkv.server.wire import Json, event

__all__ = ["manage_routes"]

_FORM: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "properties": {"files": {"type": "array", "items": {"type": "string", "format": "binary"}}},
                    "required": ["files"],
                }
            }
        },
    }
}
_EVENTS: dict[int | str, dict[str, Any]] = {
    200: {
        "description": "Events `progress`, then `done`, `failed`, `cancelled` or `interrupted`; each has the job.",
        "content": {"text/event-stream": {}},
    }
}


class JobReply(BaseModel):
    job: JobFacts


class JobListing(BaseModel):
    """The latest first."""

    jobs: list[JobFacts]


class Deletion(BaseModel):
    deleted: str


def manage_routes(served: Served, desk: JobDesk) -> APIRouter:
    """What can be changed in these indexes."""
    routes = APIRouter(prefix="/api", tags=["ragkv's own"])

    @routes.post("/indexes/{name}/documents", status_code=202, response_model=JobReply, openapi_extra=_FORM)
    async def upload(name: str, request: Request) -> Json:
        """Add files to the index, or replace those of the same names: a job ingests them."""
        queue = await asyncio.to_thread(desk.queue, name)
        identifier, folder = await asyncio.to_thread(queue.reserve)
        try:
            most = Limits.of(served.index(name).config.ingest).file
            received = await receive_files(request, folder, most_bytes=most)
            sources = await asyncio.to_thread(_sources, received)
            job = await asyncio.to_thread(queue.accept, identifier, sources)
        except BaseException:
            await asyncio.shield(asyncio.to_thread(queue.release, identifier))
            raise
        return Json(_told(job), 202, headers={"location": f"/api/indexes/{quote(name)}/jobs/{identifier}"})

    @routes.delete("/indexes/{name}/documents/{document_id:path}", response_model=Deletion)
    async def delete(name: str, document_id: str) -> Json:
        """Delete a document with all that only it needed. Answers on their way keep what they have."""
        rag = desk.writable(name)
        try:
            found = await asyncio.to_thread(rag.delete, document_id, timeout=1, on_wait=lambda _: None)
        except StoreBusyError as error:
            said = "Documents are being added to the index: delete again when that has ended."
            raise Refusal(409, said, code="busy", headers={"retry-after": "10"}) from error
        if not found:
            raise Refusal(404, "There is no such document.", code="not_found")
        return Json({"deleted": document_id})

    @routes.get("/indexes/{name}/jobs", response_model=JobListing)
    async def jobs(name: str) -> Json:
        """The ingest jobs, of those that have ended the last 32."""
        return Json({"jobs": [job.to_json() for job in await asyncio.to_thread(desk.jobs, name)]})

    @routes.get("/indexes/{name}/jobs/{job_id}", response_model=JobReply)
    async def job(name: str, job_id: str) -> Json:
        """One job."""
        return Json(_told(await _job(name, job_id)))

    @routes.get("/indexes/{name}/jobs/{job_id}/events", response_class=Response, responses=_EVENTS)
    async def events(name: str, job_id: str) -> Response:
        """What a job comes to, as server-sent events."""
        told = _events(await _job(name, job_id))
        return StreamingResponse(told, media_type="text/event-stream", headers={"x-accel-buffering": "no"})

    @routes.delete("/indexes/{name}/jobs/{job_id}", response_model=JobReply)
    async def cancel(name: str, job_id: str) -> Json:
        """End a job; what it has committed stays. The one that runs ends between two batches of its work."""
        queue = await asyncio.to_thread(desk.queue, name)
        return Json(_told(await asyncio.to_thread(queue.cancel, job_id)))

    async def _job(name: str, job_id: str) -> IngestJob:
        queue = await asyncio.to_thread(desk.queue, name)
        return await asyncio.to_thread(queue.job, job_id)

    return routes


def _sources(received: list[Received]) -> list[SourceFile]:
    return [supplied(each.path, name=each.name) for each in received]


def _told(job: IngestJob) -> dict[str, Any]:
    return {"job": job.to_json()}


async def _events(job: IngestJob) -> AsyncIterator[bytes]:
    async for told in watch(job):
        if told is None:
            yield b": still there\n\n"  # so that no proxy takes the stream for dead
        else:
            running = told["state"] in ("queued", "running")
            yield event({"job": told}, "progress" if running else told["state"])
