"""The OpenAPI document, and requests that schemathesis makes of it."""

import pytest

schemathesis = pytest.importorskip("schemathesis", reason="schemathesis is not installed")


def test_the_document_says_what_is_checked(served):
    with served.http() as client:
        made = client.get("/openapi.json").json()
    body = made["components"]["schemas"]["CompletionRequest"]
    assert body["required"] == ["prompt"] and {"n", "logprobs", "stop", "top_k", "echo"} <= set(body["properties"])
    wanted = {
        "/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/detokenize", "/health", "/health_generate", "/metrics",
        "/abort", "/flush_cache", "/expert_load", "/version", "/ping",
    }  # fmt: skip
    assert wanted <= set(made["paths"])
    for path, methods in made["paths"].items():
        for operation in methods.values():
            assert "200" in operation["responses"], path
            assert operation["summary"] and operation["operationId"]


CHECKED = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


def test_made_requests_never_break_the_server(served):
    """Every operation, with right and wrong data: no 5xx, only statuses, types and shapes that the document names."""
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import CHECKS, load_all_checks

    load_all_checks()
    served.engine.script = lambda submit, index: [20, 21, 1]
    schema = schemathesis.openapi.from_url(served.url + "/openapi.json")
    statuses = []

    def attack(operation, mode, names):
        checks = [CHECKS.get_one(name) for name in names]

        @settings(
            max_examples=4,
            deadline=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        @given(case=operation.as_strategy(mode))
        def run(case):
            answer = case.call(timeout=20)
            statuses.append(answer.status_code)
            case.validate_response(answer, checks=checks)

        run()

    for result in schema.get_all_operations():
        operation = result.ok()
        attack(operation, GenerationMode.POSITIVE, CHECKED)
        if operation.body:
            attack(operation, GenerationMode.NEGATIVE, (*CHECKED, "negative_data_rejection"))
    assert statuses.count(200) > 8 and statuses.count(400) > 8
