"""`GET /v1/models`."""

from __future__ import annotations

from fastapi import APIRouter, Response

from leyline.server.serving import Serving
from leyline.server.usage import Body
from leyline.server.wire import Json


def routes(serving: Serving) -> APIRouter:
    """The model routes. Where the model lies on disk is nobody's business."""
    router = APIRouter()

    def card() -> Body:
        return {
            "id": serving.model_name,
            "object": "model",
            "created": serving.started,
            "owned_by": "leyline",
            "max_model_len": serving.worker.engine.max_model_len,
        }

    @router.get("/v1/models")
    async def list_models() -> Response:
        """The one model that is served."""
        return Json({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")
    async def retrieve_model(name: str) -> Response:
        """The same by name."""
        serving.check_model(name)
        return Json(card())

    return router
