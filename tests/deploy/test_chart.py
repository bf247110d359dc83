"""Rendered objects of the chart are valid for each Kubernetes version, secure, and match the program."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import redis
import typer.main
import yaml
from redis.backoff import NoBackoff
from redis.retry import Retry

from dispatcher.cli import app
from dispatcher.queue.embedded import EmbeddedError, find_server
from dispatcher.queue.keys import QueueNames
from dispatcher.service.admin.server import AdminServer
from dispatcher.settings.load import NEEDS_RESTART
from tests.deploy.cases import BASIC, CASES, PICKER, QUEUE
from tests.deploy.golden import GOLDEN, golden_path, render_golden
from tests.deploy.release import CHART, Release, helm, read_environment, render, render_case
from tests.deploy.schema_check import KUBERNETES, find_schema_errors
from tests.monitoring.chart_files import FILES
from tests.monitoring.known_series import find_known_series
from tests.monitoring.promql import parse_expression
from tests.paths import DOCS
from tests.support import free_port, require_tool, wait_until_sync

CASE_NAMES = tuple(CASES)


# ── complete renders ──


@pytest.mark.parametrize("name", CASE_NAMES)
def test_rendered_objects_match_the_golden_file(name: str) -> None:
    expected = (GOLDEN / golden_path(name)).read_text()
    assert render_golden(name) == expected, "if the change is intended, run `python -m tests.deploy.golden`"


def test_every_golden_file_belongs_to_a_case() -> None:
    assert sorted(each.name for each in GOLDEN.iterdir()) == sorted(map(golden_path, CASE_NAMES))


def test_every_object_is_valid_for_every_kubernetes(schemas: Path) -> None:
    objects = {text for name in CASE_NAMES for text in render_case(name).text.split("\n---\n")}
    text = "\n---\n".join(sorted(objects))
    assert [fault for version in KUBERNETES for fault in find_schema_errors(text, version, schemas)] == []


def test_schema_check_finds_errors(schemas: Path) -> None:
    text = (
        render_case("pod-monitor")
        .text.replace("replicas:", "replicaz:")
        .replace("interval: 30s", "interval: 30x")
    )
    found = "\n".join(find_schema_errors(text, KUBERNETES[-1], schemas))
    assert "Deployment night-batch-dispatcher is invalid" in found
    assert "PodMonitor night-batch-dispatcher is invalid" in found
    unknown_kind = text.replace("kind: Service\n", "kind: Servis\n")
    assert "could not find schema for Servis" in "\n".join(
        find_schema_errors(unknown_kind, KUBERNETES[-1], schemas)
    )


# ── options ──


@pytest.mark.parametrize(
    ("name", "added", "removed"),
    [
        ("queue-by-secret", "", "Service StatefulSet"),
        ("many-replicas", "PodDisruptionBudget", "Service StatefulSet"),
        ("without-kubernetes", "", "ClusterRole ClusterRoleBinding Role RoleBinding Service StatefulSet"),
        ("through-prometheus", "", "ClusterRole ClusterRoleBinding Service StatefulSet"),
        ("files", "", "ClusterRole ClusterRoleBinding Service StatefulSet"),
        ("pod-monitor", "PodMonitor", ""),
        ("service-monitor", "ServiceMonitor", ""),
        ("rules", "PrometheusRule", ""),
        ("dashboard", "ConfigMap", ""),
        ("network-policy", "NetworkPolicy NetworkPolicy", ""),
        ("network-policy-all-rules", "NetworkPolicy", "Service StatefulSet"),
        ("keda", "ScaledObject", ""),
        (
            "keda-with-prometheus",
            "PodDisruptionBudget ScaledObject TriggerAuthentication",
            "Service StatefulSet",
        ),
        ("objective", "InferenceObjective", ""),
        ("extras", "ConfigMap Job PodDisruptionBudget", ""),
        ("sidecar", "ConfigMap PodMonitor", "Deployment Pod Service ServiceAccount StatefulSet"),
        ("shared-platform", "PodDisruptionBudget PodMonitor PrometheusRule", ""),
        ("renamed", "", "ClusterRole ClusterRoleBinding Pod Role RoleBinding ServiceAccount"),
    ],
)
def test_option_adds_and_removes_its_objects(name: str, added: str, removed: str) -> None:
    expected = [*render_case("basic").kinds, *added.split()]
    for kind in removed.split():
        expected.remove(kind)
    assert render_case(name).kinds == sorted(expected)


def test_basic_release_contains_all_objects_to_run() -> None:
    assert render_case("basic").kinds == [
        "ClusterRole",
        "ClusterRoleBinding",
        "ConfigMap",
        "Deployment",
        "Pod",
        "Role",
        "RoleBinding",
        "Service",
        "Service",
        "ServiceAccount",
        "StatefulSet",
    ]


def test_observe_passes_its_flag_to_the_dispatcher() -> None:
    assert "--observe" in render_case("observe").container["args"]
    assert "--observe" not in render_case("basic").container["args"]


def test_image_is_named_by_digest_or_tag() -> None:
    assert render_case("basic").container["image"] == "registry.example/batch-dispatcher:1.2"
    assert render_case("renamed").container["image"] == "images/batch@sha256:" + "1" * 64


def test_global_registry_is_that_of_images_without_one() -> None:
    shared = {"global": {"imageRegistry": "mirror.example"}}
    images = {
        each["image"]
        for _, pod in render({**shared, "image": {"tag": "1"}}).pods()
        for each in pod["spec"]["containers"]
    }
    assert {image.partition("/")[0] for image in images} == {"mirror.example"}
    assert render(shared).container["image"].startswith("registry.example/")


def test_image_that_was_loaded_into_the_nodes_has_the_version_of_the_chart() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    image = render({"image": {"pullPolicy": "Never"}}).container["image"]
    assert image == f"batch-dispatcher:{version}"


def test_grace_period_is_longer_than_the_drain() -> None:
    grace = {name: render_case(name).pod["terminationGracePeriodSeconds"] for name in CASE_NAMES}
    assert (grace["basic"], grace["many-replicas"], grace["extras"]) == (135, 46, 600)
    for name in CASE_NAMES:
        assert grace[name] > render_case(name).settings().shutdown.drain_s


def test_rolling_update_starts_a_pod_before_it_stops_one() -> None:
    assert render_case("basic").deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


def test_recreating_pods_has_no_settings_of_a_rolling_update() -> None:
    assert render_case("shared-platform").deployment["spec"]["strategy"] == {"type": "Recreate"}


def test_objects_can_be_in_another_namespace_than_the_release() -> None:
    release = render_case("shared-platform")
    (monitor,) = release.find_all("PodMonitor")
    assert monitor["metadata"]["namespace"] == "monitoring"
    assert monitor["spec"]["namespaceSelector"] == {"matchNames": ["batch"]}
    others = [each for each in release.objects if each is not monitor and "Cluster" not in each["kind"]]
    assert {each["metadata"]["namespace"] for each in others} == {"batch"}
    assert 'job=~"monitoring/night-batch-dispatcher|' in release.text, (
        "the job of a PodMonitor has its namespace"
    )


@pytest.mark.parametrize("kind", ["Pod", "Job"])
def test_hook_that_failed_is_deleted_because_an_uninstall_does_not_delete_hooks(kind: str) -> None:
    annotations = render_case("extras").find_one(kind)["metadata"]["annotations"]
    assert {"hook-succeeded", "hook-failed"} < set(annotations["helm.sh/hook-delete-policy"].split(","))
    assert "hook-failed" in annotations["helm.sh/hook-output-log-policy"]


LLM_D, INFERENCE_EXTENSION = "llm-d.ai/v1alpha2", "inference.networking.x-k8s.io/v1alpha2"


@pytest.mark.parametrize(
    ("served", "chosen"),
    [
        ([], LLM_D),
        ([LLM_D], LLM_D),
        ([INFERENCE_EXTENSION], INFERENCE_EXTENSION),
        ([INFERENCE_EXTENSION, LLM_D], LLM_D),
    ],
)
def test_objective_has_an_api_version_that_the_cluster_serves(served: list[str], chosen: str) -> None:
    options = [option for api in served for option in ("--api-versions", f"{api}/InferenceObjective")]
    done = helm("template", "night", *options, values={**BASIC, **CASES["objective"]})
    assert Release(done.stdout).find_one("InferenceObjective")["apiVersion"] == chosen


def test_deployment_with_keda_sets_no_replicas() -> None:
    assert "replicas" not in render_case("keda").deployment["spec"]


def test_gateway_setting_names_the_objective() -> None:
    objective, settings = (
        render_case("objective-of-inference-extension").find_one("InferenceObjective"),
        render_case("objective-of-inference-extension").settings(),
    )
    assert settings.gateway.objective == objective["metadata"]["name"] == "batch"
    assert objective["metadata"]["namespace"] == settings.pool.namespace == "models"
    assert objective["spec"]["priority"] < 0


# ── the configuration ──


@pytest.mark.parametrize("name", CASE_NAMES)
def test_program_accepts_the_configuration(name: str) -> None:
    settings = render_case(name).settings()
    assert settings.pool.name == "qwen"
    assert settings.queue.url, "an embedded queue has no producers in a pod"


@pytest.mark.parametrize("name", CASE_NAMES)
def test_files_named_in_settings_are_mounted(name: str) -> None:
    release = render_case(name)
    mounts = {each["mountPath"]: each["name"] for each in release.container["volumeMounts"]}
    volumes = {each["name"]: each for each in release.pod["volumes"]}
    file_paths = re.findall(r"_file: (/\S+)", release.config_text())
    assert bool(file_paths) == bool(CASES[name].get("secretFiles"))
    for each in file_paths:
        directory, _, file = each.rpartition("/")
        sources = volumes[mounts[directory]]["projected"]["sources"]
        items = [
            item["path"]
            for source in sources
            for source_files in source.values()
            for item in source_files["items"]
        ]
        assert file in items
    assert not any("subPath" in each for each in release.container["volumeMounts"]), (
        "a subPath mount does not follow changes"
    )
    assert Path(release.container["args"][2]).parent.as_posix() in mounts


def test_only_settings_that_cannot_be_reloaded_restart_the_pods() -> None:
    def checksum(**values: Any) -> str:
        annotations = render(values).deployment["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/restart"])

    initial_checksum = checksum()
    reloadable = {"budget": {"reserve": 0.2}, "log": {"level": "debug"}, "retry": {"max_attempts": 2}}
    assert checksum(config=reloadable, gateway={"url": "http://gateway", "timeout_s": 5}) == initial_checksum
    for value in (
        {"config": {"queue": {"name": "other"}}},
        {"config": {"tracing": {"endpoint": "http://collector"}}},
        {"config": {"admin": {"port": 9}}},
        {"gateway": {"url": "http://other"}},
        {"pool": {"name": "other"}},
    ):
        assert checksum(**value) != initial_checksum, value
    facts = json.loads((FILES / "settings.json").read_text())
    assert facts["restart"] == list(NEEDS_RESTART)


def test_queue_secret_is_referenced_and_not_stored() -> None:
    (variable,) = render_case("queue-by-secret").container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "queue", "key": "url"}
    password = read_environment(render_case("chart-valkey").container)["BATCH_DISPATCHER__QUEUE__URL"]
    assert password == "redis://:password@night-batch-dispatcher-valkey.llm.svc:6379"
    for name in CASE_NAMES:
        assert render_case(name).find_all("Secret") == []


def test_helm_test_can_use_other_queue_credentials() -> None:
    url = {"name": "BATCH_DISPATCHER__QUEUE__URL"}
    producer_url = url | {"valueFrom": {"secretKeyRef": {"name": "producer", "key": "url"}}}
    values_given = {**CASES["queue-by-secret"], "test": {"existingSecret": {"name": "producer"}}}
    url_in_extra_env = {
        "config": {"queue": {"url": "redis://redis"}},
        "extraEnv": [
            {"name": "A", "value": "b"},
            {**url, "value": "redis://:$(A)@redis"},
            {"name": "BATCH_DISPATCHER__ADMIN__PORT", "value": "9"},
        ],
        "test": values_given["test"],
    }
    for values, other_variables in ((values_given, []), (url_in_extra_env, [{"name": "A", "value": "b"}])):
        release = render(values)
        (test_container,) = release.find_one("Pod")["spec"]["containers"]
        admin = {"HOST": "night-batch-dispatcher.llm.svc", "PORT": "8080"}
        admin_address = [
            {"name": f"BATCH_DISPATCHER__ADMIN__{key}", "value": value} for key, value in admin.items()
        ]
        assert test_container["env"] == [producer_url, *other_variables, *admin_address], (
            "each variable appears once"
        )
        assert producer_url not in release.container["env"]


def test_common_labels_and_annotations_are_on_every_object() -> None:
    common = {name: {"owner": "ml", "note": "all"} for name in ("commonLabels", "commonAnnotations")}
    own_metadata = {"labels": {"note": "own"}, "annotations": {"note": "own"}}
    everything: dict[str, Any] = {"monitoring": {"podMonitor": {"enabled": True}}}
    for name in ("network-policy", "rules", "keda", "objective", "extras"):
        everything = {**everything, **CASES[name]}
    everything["monitoring"]["dashboard"] = {"enabled": True, **own_metadata}
    release = render({**everything, **common, "service": own_metadata, "extraObjects": []})
    assert {"Job", "Pod", "NetworkPolicy", "PrometheusRule", "ScaledObject"} < set(release.kinds)
    assert "helm.sh/hook" in release.find_one("Job")["metadata"]["annotations"]
    for each in release.objects:
        metadata, has_own_metadata = each["metadata"], each["metadata"]["name"].endswith("-dashboard") or (
            each["kind"] == "Service" and not each["metadata"]["name"].endswith("-valkey")
        )  # fmt: skip
        for field in ("labels", "annotations"):
            assert (
                metadata[field].items()
                >= {"owner": "ml", "note": "own" if has_own_metadata else "all"}.items()
            ), each
    assert release.text.count("owner: ml") == 2 * len(release.objects) + len(list(release.pods())) - 1


# ── names that must exist in the program ──


def find_routes() -> set[str]:
    source = inspect.getsource(AdminServer.__aenter__)
    return set(re.findall(r'"(/[a-z]+)"', source))


def list_commands() -> dict[str, set[str]]:
    """Return the options of each verb."""
    group = typer.main.get_command(app)
    found = {}
    with typer.Context(group) as context:
        for verb in group.list_commands(context):  # type: ignore[attr-defined]
            command = group.get_command(context, verb)  # type: ignore[attr-defined]
            found[verb] = {option for each in command.params for option in each.opts}
    return found


def test_probes_and_scrapes_use_paths_that_the_program_serves() -> None:
    for name in CASE_NAMES:
        release = render_case(name)
        (port,) = release.container["ports"]
        assert port["containerPort"] == release.settings().admin.port
        probes = {"startupProbe", "readinessProbe", "livenessProbe"} & set(release.container)
        assert len(probes) == (1 if name == "sidecar" else 3)
        for probe in probes:
            http_get = release.container[probe]["httpGet"]
            assert http_get["port"] == port["name"]
            assert http_get["path"] in find_routes()
        for each in release.find_all("PodMonitor") + release.find_all("ServiceMonitor"):
            spec = each["spec"]
            (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
            assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert "/metrics" in find_routes()
    (service,) = (
        each
        for each in render_case("service-monitor").find_all("Service")
        if "valkey" not in each["metadata"]["name"]
    )
    assert service["spec"]["ports"][0]["name"] == "admin"


def test_commands_in_pods_exist() -> None:
    known_commands = list_commands()
    verbs_run = set()
    for name in CASE_NAMES:
        for owner, pod in render_case(name).pods():
            for each in pod["spec"]["containers"]:
                if each["name"] in {"valkey", "extra"}:
                    continue
                verb, *rest = each["args"]
                verbs_run.add(verb)
                assert {word for word in rest if word.startswith("-")} <= known_commands[verb], owner
    assert verbs_run == {"run", "submit", "check", "status"}


def test_commands_in_the_notes_exist() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    verbs = re.findall(r"\{\{ \$run \}\} (\w+)$", notes, re.MULTILINE)
    assert verbs == ["check", "explain"]
    assert set(verbs) <= set(list_commands())
    (simulate,) = re.findall(r"^  batch-dispatcher simulate (.+)$", notes, re.MULTILINE)
    assert set(re.findall(r"--[a-z-]+", simulate)) <= list_commands()["simulate"]
    for value in re.findall(r"\b([a-z][A-Za-z]+(?:\.[A-Za-z]+)+)=true", notes):
        value_found: Any = yaml.safe_load((CHART / "values.yaml").read_text())
        for part in value.split("."):
            value_found = value_found[part]
        assert value_found is False


@pytest.mark.parametrize("name", ["basic", "observe", "sidecar", "objective", "pod-monitor"])
def test_notes_are_complete(name: str, tmp_path: Path) -> None:
    """The notes are rendered in a copy of the chart, because `helm template` leaves them out."""
    copy = tmp_path / "batch-dispatcher"
    shutil.copytree(CHART, copy)
    (copy / "templates" / "NOTES.txt").rename(copy / "NOTES.txt")
    (copy / "templates" / "notes.yaml").write_text('notes: {{ tpl (.Files.Get "NOTES.txt") . | toJson }}\n')
    arguments = [
        "template",
        "night",
        str(copy),
        "--namespace",
        "llm",
        "--kube-version",
        "1.34.0",
        "--values",
        "-",
    ]
    done = subprocess.run(
        [require_tool("helm"), *arguments, "--show-only", "templates/notes.yaml"],
        input=json.dumps({**BASIC, **CASES[name]}),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    notes = yaml.safe_load(done.stdout)["notes"]
    assert "<no value>" not in notes
    assert "\n\n\n" not in notes
    assert notes.startswith("night-batch-dispatcher fills pool llm/qwen by http://gateway.\n")
    deployment = "picker" if name == "sidecar" else "night-batch-dispatcher"
    for verb in ("check", "explain"):  # The image sets the path of the configuration.
        assert f"exec deploy/{deployment} -c dispatcher -- batch-dispatcher {verb}\n" in notes
    assert "--config" not in notes
    patched = re.findall(r"patch deployment picker .+ configmap (\S+) -o jsonpath='{\.data\.(.+)}'", notes)
    expected = [r"patch\.yaml", r"remove\.yaml"] if name == "sidecar" else []
    assert patched == [("night-batch-dispatcher-sidecar", file) for file in expected]
    assert ("It only observes" in notes) == (name == "observe")
    assert ("helm -n llm test night\n" in notes) == (name != "sidecar")
    assert ("Send one request" in notes) == (name not in {"observe", "sidecar"})
    assert ("--reset-then-reuse-values --set observe=false" in notes) == (name == "observe")
    assert ("Left out: PodMonitor. The cluster does not serve" in notes) == (
        name in {"pod-monitor", "sidecar"}
    )
    assert ("Batch requests have no priority" in notes) == (name != "objective")
    assert ("No monitor scrapes it" in notes) == (name not in {"pod-monitor", "sidecar"})
    assert ("for trials" in notes) == (name != "sidecar")


def test_role_grants_the_documented_rights_for_its_pool_only() -> None:
    page = (DOCS / "explanation" / "signals.md").read_text()
    (text,) = re.findall(r"<!-- least role -->\n```yaml\n(.*?)```", page, re.DOTALL)
    documented_rules = next(iter(yaml.safe_load_all(text)))["rules"]
    rules = render_case("basic").find_one("Role")["rules"]
    pools = [rule for rule in rules if rule["resources"] == ["inferencepools"]]
    assert [rule.pop("resourceNames") for rule in pools] == [["qwen"], ["qwen"]]
    assert rules == documented_rules
    service_rules = render_case("picker-by-service").find_one("Role")["rules"]
    assert ["endpointslices"] not in [rule["resources"] for rule in service_rules]
    (metrics,) = render_case("basic").find_one("ClusterRole")["rules"]
    assert metrics == {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}


def test_role_binding_is_in_the_namespace_of_the_pool_for_the_service_account_of_the_pod() -> None:
    release = render_case("pool-in-other-namespace")
    binding, role = release.find_one("RoleBinding"), release.find_one("Role")
    assert {binding["metadata"]["namespace"], role["metadata"]["namespace"]} == {"models"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "llm:night-batch-dispatcher"
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (release.pod["serviceAccountName"], "llm")


def test_service_account_token_is_mounted_only_if_the_api_is_used() -> None:
    assert render_case("without-kubernetes").pod["automountServiceAccountToken"] is False
    assert render_case("basic").pod["automountServiceAccountToken"] is True
    assert render_case("basic").find_one("Pod")["spec"]["automountServiceAccountToken"] is False
    assert render_case("basic").find_one("ServiceAccount")["automountServiceAccountToken"] is False


def test_keda_can_have_its_own_credentials() -> None:
    secret = {"name": "keda", "usernameKey": "user"}
    values = {"keda": {"enabled": True, "redis": {"existingSecret": secret}}}
    assert render(values).find_one("TriggerAuthentication")["spec"]["secretTargetRef"] == [
        {"parameter": "password", "name": "keda", "key": "password"},
        {"parameter": "username", "name": "keda", "key": "user"},
    ]


def test_keda_counts_keys_of_the_queue() -> None:
    for name in ("keda", "keda-with-prometheus"):
        queue = render_case(name).settings().queue
        triggers = render_case(name).find_one("ScaledObject")["spec"]["triggers"]
        counted = [each["metadata"]["listName"] for each in triggers if each["type"] == "redis"]
        names = QueueNames(queue.name, queue.results)
        leases = next(key for key in names.script_keys if key.endswith(":leases"))
        assert counted[0] == names.queue
        assert set(counted) < {names.queue, *names.script_keys}
        assert leases in counted, "otherwise KEDA stops the dispatcher that runs the last request"
        address = triggers[0]["metadata"]["address"]
        assert address in queue.url.reveal()


# ── security ──


@pytest.mark.parametrize("name", CASE_NAMES)
def test_every_pod_meets_the_restricted_pod_security_standard(name: str) -> None:
    for owner, pod in render_case(name).pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, owner
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(spec)
        assert spec["enableServiceLinks"] is False
        assert all({"configMap", "projected", "emptyDir"} & set(each) for each in spec.get("volumes", ()))
        for container in [*spec["containers"], *spec.get("initContainers", ())]:
            context = container["securityContext"]
            assert context["allowPrivilegeEscalation"] is False
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"] is True
            assert "memory" in container["resources"]["requests"]


def selector_matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    labels_match = selector.get("matchLabels", {}).items() <= labels.items()
    return labels_match and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize("name", [name for name in CASE_NAMES if name != "sidecar"])
def test_selectors_match_only_their_own_pods(name: str) -> None:
    release = render_case(name)
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"]
        for _, pod in release.pods()
    }
    for each in release.objects:
        spec, kind = each.get("spec", {}), each["kind"]
        component = each["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None or kind in {"Pod", "Job"}:
            continue
        selector_used = {"matchLabels": selector} if kind == "Service" else selector
        found = {name_found for name_found, labels in pods.items() if selector_matches(selector_used, labels)}
        own = set(pods) - {"valkey"}
        assert found == (own if kind == "NetworkPolicy" and component == "dispatcher" else {component}), (
            kind,
            component,
        )


def test_model_rewrites_can_be_read_if_models_are_observed() -> None:
    def grants_rewrites(**values: Any) -> bool:
        rules = [
            rule
            for rule in render(values).find_one("Role")["rules"]
            if "inferencemodelrewrites" in rule["resources"]
        ]
        both = {"apiGroups": ["llm-d.ai", "inference.networking.x-k8s.io"], "verbs": ["list", "watch"]}
        assert all(rule == {**both, "resources": ["inferencemodelrewrites"]} for rule in rules)
        return bool(rules)

    models = {"models": [{"name": "m"}]}
    assert grants_rewrites(config=models)
    assert grants_rewrites(config={"serving": {"observe": "gateway"}})
    assert grants_rewrites(rbac={"modelRewrites": True})
    assert not grants_rewrites()
    assert not grants_rewrites(config=models, rbac={"modelRewrites": False})
    assert not grants_rewrites(config={**models, "serving": {"observe": "off"}})


def test_network_policy_allows_only_connections_of_the_settings() -> None:
    def ports(name: str) -> list[tuple[int, ...]]:
        policy = render_case(name).find_one("NetworkPolicy", "batch-dispatcher")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["ingress"][0]["ports"][0]["port"] == render_case(name).settings().admin.port
        return [tuple(sorted({each["port"] for each in rule["ports"]})) for rule in policy["egress"]]

    assert ports("network-policy") == [(53,), (8080,), (6379,), (80,), (9090,), (443, 6443)]
    assert ports("network-policy-all-rules") == [
        (53,), (8080,), (8443,), (6379, 26379), (443, 9090), (8200,), (9090,), (443, 6443), (4318,), (8126,),
    ]  # fmt: skip
    models = [{"name": "m"}]
    for serving, other_settings, model_ports in (
        ({}, {}, []),
        ({}, {"models": models}, [8200, 8201]),
        ({"observe": "endpoints"}, {}, [8200, 8201]),
        ({"urls": ["http://a:8100", "https://b"]}, {"models": models}, [443, 8100]),
        ({"observe": "gateway"}, {"models": models}, []),
        ({"observe": "off"}, {"models": models}, []),
    ):
        target_ports = [] if "urls" in serving else [8200, 8201]
        fenced = render(
            {
                "networkPolicy": {"enabled": True, "egress": {"models": {"ports": target_ports}}},
                "config": {"serving": serving, **other_settings},
            }
        )
        egress = fenced.find_one("NetworkPolicy", "batch-dispatcher")["spec"]["egress"]
        assert sorted(each["port"] for each in egress[5]["ports"]) == (model_ports or [443, 6443])
    server = render_case("network-policy").find_one("NetworkPolicy", "valkey")["spec"]
    assert server["egress"] == []
    assert len(server["ingress"][0]["from"]) == 2


def test_names_that_look_like_other_yaml_types_stay_strings(schemas: Path) -> None:
    """Kubernetes allows `no`, `1e3` and `123` as names, which YAML reads as other types without quotes."""
    values: dict[str, Any] = {
        "pool": {"name": "1e3", "namespace": "on"},
        "fullnameOverride": "no",
        "priorityClassName": "null",
        "secretFiles": {"gateway.token_file": {"secret": "123", "key": "1"}},
        "monitoring": {
            "podMonitor": {"enabled": True},
            "rules": {"enabled": True},
            "dashboard": {"enabled": True},
        },
    }
    for name in ("pod-monitor", "network-policy", "keda", "objective", "extras"):
        values = {**CASES[name], **values}
    release = render(values, "true", "no")
    assert find_schema_errors(release.text, KUBERNETES[-1], schemas) == []
    assert release.settings().pool.name == "1e3"
    assert {each["metadata"].get("namespace", "no") for each in release.objects} == {"no", "on"}


def list_identities(release: Release, namespace: str) -> set[tuple[str, str, str]]:
    scoped = {"ClusterRole", "ClusterRoleBinding"}
    return {
        (
            each["kind"],
            "" if each["kind"] in scoped else each["metadata"].get("namespace", namespace),
            each["metadata"]["name"],
        )
        for each in release.objects
    }


def test_two_releases_have_no_object_in_common() -> None:
    values: dict[str, Any] = {
        **CASES["pod-monitor"],
        **CASES["network-policy"],
        "pool": {"name": "qwen", "namespace": "models"},
    }
    one, two = render(values), render(values, "day")
    elsewhere = render(values, namespace="other")
    assert list_identities(one, "llm") & list_identities(two, "llm") == set()
    assert list_identities(one, "llm") & list_identities(elsewhere, "other") == set()


# ── as a sidecar ──


def test_sidecar_patch_adds_a_container_and_changes_nothing_else_in_the_picker(
    tmp_path: Path, schemas: Path
) -> None:
    release = render_case("sidecar")
    (tmp_path / "picker.yaml").write_text(PICKER)
    (tmp_path / "patch.yaml").write_text(release.patch())
    kustomization = {"resources": ["picker.yaml"], "patches": [{"path": "patch.yaml"}]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    build = [require_tool("kustomize"), "build", str(tmp_path)]
    text = subprocess.run(build, capture_output=True, text=True, check=True).stdout
    assert find_schema_errors(text, KUBERNETES[-1], schemas) == []
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    dispatcher, picker = sorted(pod["containers"], key=lambda each: str(each["name"]))
    assert picker == yaml.safe_load(PICKER)["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"] for each in pod["volumes"]} >= {"config", "dispatcher-config"}
    (tmp_path / "remove.yaml").write_text(
        str(release.find_one("ConfigMap", "-sidecar")["data"]["remove.yaml"])
    )
    kustomization["patches"] = [{"path": "patch.yaml"}, {"path": "remove.yaml"}]
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    restored = yaml.safe_load(subprocess.run(build, capture_output=True, text=True, check=True).stdout)
    restored["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 130
    restored["spec"]["template"]["metadata"].pop("annotations", None)
    assert restored == yaml.safe_load(PICKER), "nothing of the dispatcher is left in the picker's Deployment"
    assert not {"readinessProbe", "startupProbe"} & set(dispatcher), (
        "the picker's pod must not wait for a queue"
    )
    assert dispatcher["securityContext"]["runAsNonRoot"] is True, "the pod's own context is the picker's"
    assert dispatcher["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [url.reveal() for url in release.settings().signals.epp.urls] == ["http://127.0.0.1:9090"]


def test_rights_scrapes_and_service_of_a_sidecar_refer_to_the_pods_of_the_picker() -> None:
    release = render_case("sidecar")
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        assert [each["name"] for each in release.find_one(kind)["subjects"]] == ["picker"]
    assert release.find_one("Service")["spec"]["selector"] == {"app": "picker"}
    assert release.find_one("PodMonitor")["spec"]["selector"] == {"matchLabels": {"app": "picker"}}


# ── rules ──


def list_rules(name: str) -> list[dict[str, Any]]:
    groups = render_case(name).find_one("PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps(render_case("rules").find_one("PrometheusRule")["spec"]))
    done = subprocess.run(
        [require_tool("promtool"), "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(list_rules('rules'))} rules found" in done.stdout


def test_rules_select_only_the_pool_of_the_release() -> None:
    pool_labels = {"namespace": "llm", "pool": "qwen"}
    for rule in list_rules("rules"):
        for selector in parse_expression(rule["expr"]).selectors:
            if "batch_dispatcher" in selector.name:
                assert selector.name in find_known_series()
                assert {each.label: each.value for each in selector.matchers}.items() >= pool_labels.items()
    (down,) = (rule for rule in list_rules("rules") if rule.get("alert") == "BatchDispatcherReplicaDown")
    assert 'job=~"llm/night-batch-dispatcher|night-batch-dispatcher"' in down["expr"]


def test_rules_match_the_files_except_for_configured_alerts() -> None:
    plain = yaml.safe_load((FILES / "rules.yaml").read_text())
    expected = {
        rule.get("alert") or rule["record"]: rule for group in plain["groups"] for rule in group["rules"]
    }
    configured_alerts = CASES["rules"]["monitoring"]["rules"]["alerts"]
    found = {rule.get("alert") or rule["record"]: rule for rule in list_rules("rules")}
    assert set(expected) - set(found) == {"BatchDispatcherStarved"}
    for name, rule in found.items():
        expected_rule = expected[name]
        assert rule.get("annotations", {}).get("summary") == expected_rule.get("annotations", {}).get(
            "summary"
        )
        if name in configured_alerts:
            continue
        assert [each.name for each in parse_expression(rule["expr"]).selectors] == [
            each.name for each in parse_expression(expected_rule["expr"]).selectors
        ]
        assert (rule.get("for"), rule.get("labels")) == (
            expected_rule.get("for"),
            expected_rule.get("labels"),
        )
        expression = re.sub(r"\s", "", rule["expr"]).replace('namespace="llm",pool="qwen",', "")
        expression = expression.replace('{namespace="llm",pool="qwen"}', "").replace(
            "llm/night-batch-dispatcher|night-batch-dispatcher", ".*batch-dispatcher.*"
        )
        assert expression == re.sub(r"\s", "", expected_rule["expr"]).replace('{pool=~".+"}', ""), name
    refusals = found["BatchDispatcherRefusals"]
    assert "> 0.2\n" in refusals["expr"]
    assert (refusals["for"], refusals["labels"]) == ("10m", {"severity": "info"})
    assert refusals["annotations"]["runbook_url"] == "https://wiki/runbook.md#batchdispatcherrefusals"
    assert "[2d]" in found["BatchDispatcherDown"]["expr"]


def test_scrape_config_of_the_guide_selects_only_the_port_of_the_dispatcher(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- scrape -->\n```yaml\n(.*?)```", page, re.DOTALL)
    shutil.copy(FILES / "rules.yaml", tmp_path / "batch-dispatcher-rules.yaml")
    discovery = "kubernetes_sd_configs: [{role: pod}]"  # The promtool of Debian is built without it.
    assert discovery in text
    (tmp_path / "prometheus.yaml").write_text(text.replace(discovery, "static_configs: []"))
    check = [require_tool("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load(text)["scrape_configs"]
    job_patterns = re.findall(r'job=~"(.+?)"', (FILES / "rules.yaml").read_text())
    assert job_patterns
    assert all(re.fullmatch(each, job["job_name"]) for each in job_patterns)
    scraped_pods = [
        (owner, labels["namespace"])
        for name in ("extras", "pod-monitor", "chart-valkey")
        for owner, pod in render_case(name).pods()
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [{"name": ""}])
        if (labels := relabel_target(job, pod["metadata"]["labels"], port["name"]))
    ]
    assert scraped_pods == [("Deployment night-batch-dispatcher", "llm")] * 3


def relabel_target(job: Mapping[str, Any], labels: Mapping[str, str], port: str) -> dict[str, str]:
    """Return the labels of the target for a port of a pod, or no labels if the port is not scraped."""
    target = {"__meta_kubernetes_namespace": "llm", "__meta_kubernetes_pod_name": "a"}
    target |= {"__meta_kubernetes_pod_container_port_name": port}
    target |= {
        f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', label)}": labels[label]
        for label in labels
    }
    for rule in job["relabel_configs"]:
        value = ";".join(target.get(each, "") for each in rule["source_labels"])
        if rule.get("action", "replace") == "replace":
            target[rule["target_label"]] = value
        elif not re.fullmatch(rule["regex"], value):
            return {}
    return target


def test_dashboard_links_to_the_configured_runbook() -> None:
    monitoring = {"runbookUrl": 'https://wiki/"runbook".md', "dashboard": {"enabled": True}}
    (text,) = render({"monitoring": monitoring}).find_one("ConfigMap", "-dashboard")["data"].values()
    variables = json.loads(text)["templating"]["list"]
    assert [each["query"] for each in variables if each["name"] == "runbook"] == [monitoring["runbookUrl"]]


def test_keda_query_is_valid_and_uses_known_metrics(tmp_path: Path) -> None:
    triggers = render_case("keda-with-prometheus").find_one("ScaledObject")["spec"]["triggers"]
    (query,) = (each["metadata"]["query"] for each in triggers if each["type"] == "prometheus")
    for selector in parse_expression(query).selectors:
        assert selector.name in find_known_series()
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "a", "rules": [{"record": "b", "expr": query}]}]}))
    done = subprocess.run(
        [require_tool("promtool"), "check", "rules", file], capture_output=True, check=False
    )
    assert done.returncode == 0


# ── the queue of the chart ──


def test_valkey_starts_with_the_arguments_of_the_chart(tmp_path: Path) -> None:
    """Start the real server with the arguments of the pod: an append-only file in /data, no eviction."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    (container,) = render_case("chart-valkey").find_one("StatefulSet")["spec"]["template"]["spec"][
        "containers"
    ]
    port = free_port()
    arguments = [
        each.replace("$(VALKEY_PASSWORD)", "password").replace("/data", str(tmp_path))
        for each in container["args"]
    ]
    process = subprocess.Popen(
        [server, *arguments, "--port", str(port), "--bind", "127.0.0.1"], stdout=subprocess.DEVNULL, cwd="/"
    )
    try:
        once = Retry(NoBackoff(), 0)
        client = redis.Redis(port=port, password="password", decode_responses=True, retry=once)
        wait_until_sync(lambda: is_answering(client), what="Valkey answers")
        assert client.config_get("appendonly", "maxmemory-policy", "maxmemory", "save") == {
            "appendonly": "yes",
            "maxmemory-policy": "noeviction",
            "maxmemory": "536870912",
            "save": "",
        }
        with pytest.raises(redis.AuthenticationError):
            redis.Redis(port=port, retry=once).ping()
    finally:
        process.terminate()
        process.wait()
    assert (tmp_path / "appendonlydir").is_dir()


def is_answering(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_chart_omits_its_valkey_if_another_queue_is_configured() -> None:
    assert render_case("queue-by-url").find_all("StatefulSet") == []
    assert render({"valkey": {"enabled": True}}).find_all("StatefulSet") != []
    kept = render({"valkey": {"persistence": {"keep": False}}}).find_one("StatefulSet")["spec"]
    assert kept["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"


def test_basic_values_contain_only_required_values() -> None:
    assert {f"{section}.{field}" for section, fields in BASIC.items() for field in fields} == {
        "pool.name",
        "gateway.url",
        "image.registry",
        "image.tag",
    }
    assert QUEUE["redis"]["existingSecret"]["name"]
