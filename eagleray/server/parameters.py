"""Parameters of control calls: query parameters or fields of a JSON body, decoded into a struct.

Clients of other engines send some calls without a body, some with one, and some with a query. Driven by the handlers.
"""

from __future__ import annotations

from typing import Annotated, Any, Generic, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from starlette.requests import Request

from eagleray.server.body import BodyDecoder, decode_object
from eagleray.server.service import Service

T = TypeVar("T", bound=msgspec.Struct)


class ControlParameters(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Parameters of every control call."""

    timeout: Annotated[float, Meta(gt=0, description="Seconds for all engines together. Default: 600.")] | None = None


class ParameterDecoder(Generic[T]):
    """Reads the parameters of one route in the form of the struct `kind`. A field of the body
    takes precedence over one of the query."""

    def __init__(self, kind: type[T], service: Service) -> None:
        self._kind = kind
        self._body: BodyDecoder[T] = service.body_decoder(kind)
        self._lists = {name for name, hint in get_type_hints(kind).items() if _is_list(hint)}

    async def read(self, request: Request) -> T:
        """Return the parameters. The body of a GET is ignored. Raises `InvalidRequest` that names the field."""
        fields = self._of_query(request)
        if request.method == "POST" and (body := await self._body.read_bytes(request)):
            fields |= decode_object(body)
        return self._body.convert(fields)

    def _of_query(self, request: Request) -> dict[str, Any]:
        query = request.query_params
        return {name: query.getlist(name) if name in self._lists else query[name] for name in query}


def _is_list(hint: Any) -> bool:
    return get_origin(hint) is list or any(_is_list(part) for part in get_args(hint))
