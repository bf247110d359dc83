"""What the chart renders: valid for each Kubernetes, locked down, at one with the program that it runs."""

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

from dispatcher.admin.server import AdminServer
from dispatcher.cli import app
from dispatcher.queue.embedded import EmbeddedError, find_server
from dispatcher.queue.keys import QueueNames
from dispatcher.settings.load import NEEDS_RESTART
from tests.deploy.cases import BASIC, CASES, PICKER, QUEUE
from tests.deploy.conformity import KUBERNETES, faults
from tests.deploy.golden import GOLDEN, golden, path
from tests.deploy.release import CHART, Release, case, environment, render
from tests.monitoring.files import FILES
from tests.monitoring.names import known
from tests.monitoring.promql import named
from tests.paths import DOCS
from tests.support import free_port, require_tool, wait_until_sync

EVERY = tuple(CASES)


# ── whole ──


@pytest.mark.parametrize("name", EVERY)
def test_render_is_the_golden_one(name: str) -> None:
    expected = (GOLDEN / path(name)).read_text()
    assert golden(name) == expected, "as it should be? `python -m tests.deploy.golden` writes it"


def test_there_is_no_golden_render_of_nothing() -> None:
    assert sorted(each.name for each in GOLDEN.iterdir()) == sorted(map(path, EVERY))


def test_every_object_is_valid_for_every_kubernetes(schemas: Path) -> None:
    objects = {text for name in EVERY for text in case(name).text.split("\n---\n")}
    text = "\n---\n".join(sorted(objects))
    assert [fault for version in KUBERNETES for fault in faults(text, version, schemas)] == []


def test_schemas_would_notice(schemas: Path) -> None:
    text = (
        case("pods-scraped").text.replace("replicas:", "replicaz:").replace("interval: 30s", "interval: 30x")
    )
    found = "\n".join(faults(text, KUBERNETES[-1], schemas))
    assert "Deployment night-batch-dispatcher is invalid" in found
    assert "PodMonitor night-batch-dispatcher is invalid" in found
    strange = text.replace("kind: Service\n", "kind: Servis\n")
    assert "could not find schema for Servis" in "\n".join(faults(strange, KUBERNETES[-1], schemas))


# ── switches ──


@pytest.mark.parametrize(
    ("name", "more", "less"),
    [
        ("queue-by-secret", "", "Service StatefulSet"),
        ("many-replicas", "PodDisruptionBudget", "Service StatefulSet"),
        ("without-kubernetes", "", "ClusterRole ClusterRoleBinding Role RoleBinding Service StatefulSet"),
        ("through-prometheus", "", "ClusterRole ClusterRoleBinding Service StatefulSet"),
        ("files", "", "ClusterRole ClusterRoleBinding Service StatefulSet"),
        ("pods-scraped", "PodMonitor", ""),
        ("service-scraped", "ServiceMonitor", ""),
        ("rules", "PrometheusRule", ""),
        ("dashboard", "ConfigMap", ""),
        ("fenced", "NetworkPolicy NetworkPolicy", ""),
        ("fenced-all", "NetworkPolicy", "Service StatefulSet"),
        ("scaled", "ScaledObject", ""),
        (
            "scaled-by-deadlines",
            "PodDisruptionBudget ScaledObject TriggerAuthentication",
            "Service StatefulSet",
        ),
        ("objective", "InferenceObjective", ""),
        ("more-of-everything", "ConfigMap Job PodDisruptionBudget", ""),
        ("sidecar", "ConfigMap PodMonitor", "Deployment Pod Service ServiceAccount StatefulSet"),
        ("renamed", "", "ClusterRole ClusterRoleBinding Pod Role RoleBinding ServiceAccount"),
    ],
)
def test_switch_adds_and_takes_its_objects(name: str, more: str, less: str) -> None:
    expected = [*case("basic").kinds, *more.split()]
    for kind in less.split():
        expected.remove(kind)
    assert case(name).kinds == sorted(expected)


def test_basic_release_is_a_system_that_works_by_itself() -> None:
    assert case("basic").kinds == [
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


def test_observing_sends_nothing() -> None:
    assert "--observe" in case("observing").container["args"]
    assert "--observe" not in case("basic").container["args"]


def test_image_is_the_chart_s_version_unless_pinned() -> None:
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    assert case("basic").container["image"] == f"batch-dispatcher:{version}"
    assert case("renamed").container["image"] == "images/batch@sha256:" + "1" * 64
    assert render({"image": {"tag": "9"}}).container["image"] == "batch-dispatcher:9"


def test_pod_is_given_longer_than_the_drain() -> None:
    grace = {name: case(name).pod["terminationGracePeriodSeconds"] for name in EVERY}
    assert (grace["basic"], grace["many-replicas"], grace["more-of-everything"]) == (135, 46, 600)
    for name in EVERY:
        assert grace[name] > case(name).settings().shutdown.drain_s


def test_update_starts_one_before_it_stops_one() -> None:
    assert case("basic").deployment["spec"]["strategy"] == {
        "type": "RollingUpdate",
        "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0},
    }


def test_scaled_deployment_leaves_its_number_to_keda() -> None:
    assert "replicas" not in case("scaled").deployment["spec"]


def test_objective_is_named_to_the_gateway() -> None:
    made, settings = case("objective-of-gie").one("InferenceObjective"), case("objective-of-gie").settings()
    assert settings.gateway.objective == made["metadata"]["name"] == "batch"
    assert made["metadata"]["namespace"] == settings.pool.namespace == "models"
    assert made["spec"]["priority"] < 0


# ── the configuration ──


@pytest.mark.parametrize("name", EVERY)
def test_configuration_loads_in_the_program(name: str) -> None:
    settings = case(name).settings()
    assert settings.pool.name == "qwen"
    assert settings.queue.url, "an embedded queue has no producers in a pod"


@pytest.mark.parametrize("name", EVERY)
def test_files_that_settings_name_are_mounted(name: str) -> None:
    release = case(name)
    mounts = {each["mountPath"]: each["name"] for each in release.container["volumeMounts"]}
    volumes = {each["name"]: each for each in release.pod["volumes"]}
    named_ = re.findall(r"_file: (/\S+)", release.config_text())
    assert bool(named_) == bool(CASES[name].get("secretFiles"))
    for each in named_:
        directory, _, file = each.rpartition("/")
        sources = volumes[mounts[directory]]["projected"]["sources"]
        items = [item["path"] for source in sources for of in source.values() for item in of["items"]]
        assert file in items
    assert not any("subPath" in each for each in release.container["volumeMounts"]), "never sees a change"
    assert Path(release.container["args"][2]).parent.as_posix() in mounts


def test_only_what_cannot_change_in_a_running_dispatcher_restarts_it() -> None:
    def checksum(**values: Any) -> str:
        annotations = render(values).deployment["spec"]["template"]["metadata"]["annotations"]
        return str(annotations["checksum/restart"])

    before = checksum()
    taken = {"budget": {"reserve": 0.2}, "log": {"level": "debug"}, "retry": {"max_attempts": 2}}
    assert checksum(config=taken, gateway={"url": "http://gateway", "timeout_s": 5}) == before
    for value in (
        {"config": {"queue": {"name": "other"}}},
        {"config": {"tracing": {"endpoint": "http://collector"}}},
        {"config": {"admin": {"port": 9}}},
        {"gateway": {"url": "http://other"}},
        {"pool": {"name": "other"}},
    ):
        assert checksum(**value) != before, value
    facts = json.loads((FILES / "settings.json").read_text())
    assert facts["restart"] == list(NEEDS_RESTART)


def test_secret_of_the_queue_is_named_and_not_held() -> None:
    (variable,) = case("queue-by-secret").container["env"]
    assert variable["valueFrom"]["secretKeyRef"] == {"name": "queue", "key": "url"}
    password = environment(case("queue-of-ours").container)["BATCH_DISPATCHER__QUEUE__URL"]
    assert password == "redis://:password@night-batch-dispatcher-valkey.llm.svc:6379"
    for name in EVERY:
        assert case(name).all("Secret") == []


def test_helm_test_can_be_another_user_of_the_queue() -> None:
    url = {"name": "BATCH_DISPATCHER__QUEUE__URL"}
    of_producer = url | {"valueFrom": {"secretKeyRef": {"name": "producer", "key": "url"}}}
    given = {**CASES["queue-by-secret"], "test": {"existingSecret": {"name": "producer"}}}
    by_variable = {
        "config": {"queue": {"url": "redis://redis"}},
        "extraEnv": [
            {"name": "A", "value": "b"},
            {**url, "value": "redis://:$(A)@redis"},
            {"name": "BATCH_DISPATCHER__ADMIN__PORT", "value": "9"},
        ],
        "test": given["test"],
    }
    for values, others in ((given, []), (by_variable, [{"name": "A", "value": "b"}])):
        release = render(values)
        (asks,) = release.one("Pod")["spec"]["containers"]
        admin = {"HOST": "night-batch-dispatcher.llm.svc", "PORT": "8080"}
        asked = [{"name": f"BATCH_DISPATCHER__ADMIN__{key}", "value": value} for key, value in admin.items()]
        assert asks["env"] == [of_producer, *others, *asked], "each variable once"
        assert of_producer not in release.container["env"]


def test_labels_and_annotations_of_all_are_on_every_object() -> None:
    given = {name: {"owner": "ml", "note": "all"} for name in ("commonLabels", "commonAnnotations")}
    own = {"labels": {"note": "own"}, "annotations": {"note": "own"}}
    everything: dict[str, Any] = {"monitoring": {"podMonitor": {"enabled": True}}}
    for name in ("fenced", "rules", "scaled", "objective", "more-of-everything"):
        everything = {**everything, **CASES[name]}
    everything["monitoring"]["dashboard"] = {"enabled": True, **own}
    release = render({**everything, **given, "service": own, "extraObjects": []})
    assert {"Job", "Pod", "NetworkPolicy", "PrometheusRule", "ScaledObject"} < set(release.kinds)
    assert "helm.sh/hook" in release.one("Job")["metadata"]["annotations"]
    for each in release.objects:
        of, mine = each["metadata"], each["metadata"]["name"].endswith("-dashboard") or (
            each["kind"] == "Service" and not each["metadata"]["name"].endswith("-valkey")
        )  # fmt: skip
        for place in ("labels", "annotations"):
            assert of[place].items() >= {"owner": "ml", "note": "own" if mine else "all"}.items(), each
    assert release.text.count("owner: ml") == 2 * len(release.objects) + len(list(release.pods())) - 1


# ── what it names exists in the program ──


def routes() -> set[str]:
    source = inspect.getsource(AdminServer.__aenter__)
    return set(re.findall(r'"(/[a-z]+)"', source))


def commands() -> dict[str, set[str]]:
    """Each verb with its options."""
    group = typer.main.get_command(app)
    found = {}
    with typer.Context(group) as context:
        for verb in group.list_commands(context):  # type: ignore[attr-defined]
            command = group.get_command(context, verb)  # type: ignore[attr-defined]
            found[verb] = {option for each in command.params for option in each.opts}
    return found


def test_probes_and_scrapes_ask_for_paths_that_are_served() -> None:
    for name in EVERY:
        release = case(name)
        (port,) = release.container["ports"]
        assert port["containerPort"] == release.settings().admin.port
        probes = {"startupProbe", "readinessProbe", "livenessProbe"} & set(release.container)
        assert len(probes) == (1 if name == "sidecar" else 3)
        for probe in probes:
            asked = release.container[probe]["httpGet"]
            assert asked["port"] == port["name"]
            assert asked["path"] in routes()
        for each in release.all("PodMonitor") + release.all("ServiceMonitor"):
            spec = each["spec"]
            (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
            assert (endpoint["port"], endpoint["path"]) == (port["name"], "/metrics")
    assert "/metrics" in routes()
    (service,) = (
        each for each in case("service-scraped").all("Service") if "valkey" not in each["metadata"]["name"]
    )
    assert service["spec"]["ports"][0]["name"] == "admin"


def test_commands_that_pods_run_exist() -> None:
    known_commands = commands()
    ran = set()
    for name in EVERY:
        for where, pod in case(name).pods():
            for each in pod["spec"]["containers"]:
                if each["name"] in {"valkey", "beside"}:
                    continue
                verb, *rest = each["args"]
                ran.add(verb)
                assert {word for word in rest if word.startswith("-")} <= known_commands[verb], where
    assert ran == {"run", "submit", "check", "status"}


def test_commands_of_the_notes_exist() -> None:
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    verbs = re.findall(r"\{\{ \$run \}\} (\w+)$", notes, re.MULTILINE)
    assert verbs == ["check", "explain"]
    assert set(verbs) <= set(commands())
    (simulate,) = re.findall(r"^  batch-dispatcher simulate (.+)$", notes, re.MULTILINE)
    assert set(re.findall(r"--[a-z-]+", simulate)) <= commands()["simulate"]
    for value in re.findall(r"\b([a-z][A-Za-z]+(?:\.[A-Za-z]+)+)=true", notes):
        here: Any = yaml.safe_load((CHART / "values.yaml").read_text())
        for part in value.split("."):
            here = here[part]
        assert here is False


@pytest.mark.parametrize("name", ["basic", "observing", "sidecar", "objective", "pods-scraped"])
def test_notes_are_whole(name: str, tmp_path: Path) -> None:
    """Rendered in a ConfigMap of a copy: `helm template` leaves them out."""
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
    where = "picker" if name == "sidecar" else "night-batch-dispatcher"
    for verb in ("check", "explain"):  # the image says where the configuration is
        assert f"exec deploy/{where} -c dispatcher -- batch-dispatcher {verb}\n" in notes
    assert "--config" not in notes
    patched = re.findall(r"patch deployment picker .+ configmap (\S+) -o jsonpath='{\.data\.(.+)}'", notes)
    expected = [r"patch\.yaml", r"remove\.yaml"] if name == "sidecar" else []
    assert patched == [("night-batch-dispatcher-sidecar", each) for each in expected]
    assert ("It only watches" in notes) == (name == "observing")
    assert ("helm -n llm test night --logs" in notes) == (name != "sidecar")
    assert ("Send one request" in notes) == (name not in {"observing", "sidecar"})
    assert ("--reset-then-reuse-values --set observe=false" in notes) == (name == "observing")
    assert ("Left out: PodMonitor. The cluster does not serve" in notes) == (
        name in {"pods-scraped", "sidecar"}
    )
    assert ("Batch requests have no priority" in notes) == (name != "objective")
    assert ("Nobody scrapes it" in notes) == (name not in {"pods-scraped", "sidecar"})
    assert ("for trials" in notes) == (name != "sidecar")


def test_rights_are_those_of_the_docs_for_this_pool_alone() -> None:
    page = (DOCS / "explanation" / "signals.md").read_text()
    (text,) = re.findall(r"<!-- least role -->\n```yaml\n(.*?)```", page, re.DOTALL)
    least = next(iter(yaml.safe_load_all(text)))["rules"]
    rules = case("basic").one("Role")["rules"]
    pools = [rule for rule in rules if rule["resources"] == ["inferencepools"]]
    assert [rule.pop("resourceNames") for rule in pools] == [["qwen"], ["qwen"]]
    assert rules == least
    fewer = case("picker-by-service").one("Role")["rules"]
    assert ["endpointslices"] not in [rule["resources"] for rule in fewer]
    (metrics,) = case("basic").one("ClusterRole")["rules"]
    assert metrics == {"nonResourceURLs": ["/metrics"], "verbs": ["get"]}


def test_rights_are_given_where_the_pool_is_to_whom_the_pod_is() -> None:
    release = case("pool-elsewhere")
    binding, role = release.one("RoleBinding"), release.one("Role")
    assert {binding["metadata"]["namespace"], role["metadata"]["namespace"]} == {"models"}
    assert binding["roleRef"]["name"] == role["metadata"]["name"] == "llm:night-batch-dispatcher"
    (subject,) = binding["subjects"]
    assert (subject["name"], subject["namespace"]) == (release.pod["serviceAccountName"], "llm")


def test_no_token_is_mounted_where_nothing_is_read() -> None:
    assert case("without-kubernetes").pod["automountServiceAccountToken"] is False
    assert case("basic").pod["automountServiceAccountToken"] is True
    assert case("basic").one("Pod")["spec"]["automountServiceAccountToken"] is False
    assert case("basic").one("ServiceAccount")["automountServiceAccountToken"] is False


def test_keda_can_be_a_user_of_its_own() -> None:
    secret = {"name": "keda", "usernameKey": "user"}
    given = {"keda": {"enabled": True, "redis": {"existingSecret": secret}}}
    assert render(given).one("TriggerAuthentication")["spec"]["secretTargetRef"] == [
        {"parameter": "password", "name": "keda", "key": "password"},
        {"parameter": "username", "name": "keda", "key": "user"},
    ]


def test_keda_counts_keys_that_the_queue_has() -> None:
    for name in ("scaled", "scaled-by-deadlines"):
        queue = case(name).settings().queue
        triggers = case(name).one("ScaledObject")["spec"]["triggers"]
        counted = [each["metadata"]["listName"] for each in triggers if each["type"] == "redis"]
        names = QueueNames(queue.name, queue.results)
        leases = next(key for key in names.script_keys if key.endswith(":leases"))
        assert counted[0] == names.queue
        assert set(counted) < {names.queue, *names.script_keys}
        assert leases in counted, "or the last request ends with the dispatcher that runs it"
        address = triggers[0]["metadata"]["address"]
        assert address in queue.url.reveal()


# ── locked down ──


@pytest.mark.parametrize("name", EVERY)
def test_every_pod_meets_the_standard_restricted(name: str) -> None:
    for where, pod in case(name).pods():
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, where
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


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    return wanted and all(
        labels.get(each["key"]) in each["values"] for each in selector.get("matchExpressions", ())
    )


@pytest.mark.parametrize("name", [name for name in EVERY if name != "sidecar"])
def test_selectors_find_their_own_pods_and_no_others(name: str) -> None:
    release = case(name)
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/component"]: pod["metadata"]["labels"]
        for _, pod in release.pods()
    }
    for each in release.objects:
        spec, kind = each.get("spec", {}), each["kind"]
        of = each["metadata"].get("labels", {}).get("app.kubernetes.io/component")
        selector = spec.get("selector") or spec.get("podSelector")
        if selector is None or kind in {"Pod", "Job"}:
            continue
        wanted = {"matchLabels": selector} if kind == "Service" else selector
        found = {component for component, labels in pods.items() if selects(wanted, labels)}
        ours = set(pods) - {"valkey"}
        assert found == (ours if kind == "NetworkPolicy" and of == "dispatcher" else {of}), (kind, of)


def test_rewrites_of_names_may_be_read_where_models_are_observed() -> None:
    def may(**values: Any) -> bool:
        rules = [
            rule
            for rule in render(values).one("Role")["rules"]
            if "inferencemodelrewrites" in rule["resources"]
        ]
        both = {"apiGroups": ["llm-d.ai", "inference.networking.x-k8s.io"], "verbs": ["list", "watch"]}
        assert all(rule == {**both, "resources": ["inferencemodelrewrites"]} for rule in rules)
        return bool(rules)

    models = {"models": [{"name": "m"}]}
    assert may(config=models)
    assert may(config={"serving": {"observe": "gateway"}})
    assert may(rbac={"modelRewrites": True})
    assert not may()
    assert not may(config=models, rbac={"modelRewrites": False})
    assert not may(config={**models, "serving": {"observe": "off"}})


def test_fence_lets_through_what_the_settings_need_and_nothing_else() -> None:
    def ports(name: str) -> list[tuple[int, ...]]:
        policy = case(name).one("NetworkPolicy", "batch-dispatcher")["spec"]
        assert policy["policyTypes"] == ["Ingress", "Egress"]
        assert policy["ingress"][0]["ports"][0]["port"] == case(name).settings().admin.port
        return [tuple(sorted({each["port"] for each in rule["ports"]})) for rule in policy["egress"]]

    assert ports("fenced") == [(53,), (8080,), (6379,), (80,), (9090,), (443, 6443)]
    assert ports("fenced-all") == [
        (53,), (8080,), (8443,), (6379, 26379), (443, 9090), (8000,), (9090,), (443, 6443), (4318,), (8126,),
    ]  # fmt: skip
    models = [{"name": "m"}]
    for serving, more, asked in (
        ({}, {}, []),
        ({}, {"models": models}, [8000]),
        ({"observe": "endpoints"}, {}, [8000]),
        ({"urls": ["http://a:8100", "https://b"]}, {"models": models}, [443, 8100]),
        ({"observe": "gateway"}, {"models": models}, []),
        ({"observe": "off"}, {"models": models}, []),
    ):
        fenced = render({"networkPolicy": {"enabled": True}, "config": {"serving": serving, **more}})
        egress = fenced.one("NetworkPolicy", "batch-dispatcher")["spec"]["egress"]
        assert sorted(each["port"] for each in egress[5]["ports"]) == (asked or [443, 6443])
    server = case("fenced").one("NetworkPolicy", "valkey")["spec"]
    assert server["egress"] == []
    assert len(server["ingress"][0]["from"]) == 2


def test_names_that_yaml_takes_for_something_else_stay_names(schemas: Path) -> None:
    """Kubernetes allows `no`, `1e3` and `123` as names, and YAML has ideas of its own about them."""
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
    for name in ("pods-scraped", "fenced", "scaled", "objective", "more-of-everything"):
        values = {**CASES[name], **values}
    release = render(values, "true", "no")
    assert faults(release.text, KUBERNETES[-1], schemas) == []
    assert release.settings().pool.name == "1e3"
    assert {each["metadata"].get("namespace", "no") for each in release.objects} == {"no", "on"}


def identities(release: Release, namespace: str) -> set[tuple[str, str, str]]:
    scoped = {"ClusterRole", "ClusterRoleBinding"}
    return {
        (
            each["kind"],
            "" if each["kind"] in scoped else each["metadata"].get("namespace", namespace),
            each["metadata"]["name"],
        )
        for each in release.objects
    }


def test_two_releases_do_not_touch() -> None:
    values: dict[str, Any] = {
        **CASES["pods-scraped"],
        **CASES["fenced"],
        "pool": {"name": "qwen", "namespace": "models"},
    }
    one, two = render(values), render(values, "day")
    elsewhere = render(values, namespace="other")
    assert identities(one, "llm") & identities(two, "llm") == set()
    assert identities(one, "llm") & identities(elsewhere, "other") == set()


# ── as a sidecar ──


def test_sidecar_joins_the_picker_and_takes_nothing_from_it(tmp_path: Path, schemas: Path) -> None:
    release = case("sidecar")
    (tmp_path / "picker.yaml").write_text(PICKER)
    (tmp_path / "patch.yaml").write_text(release.patch())
    kustomization = {"resources": ["picker.yaml"], "patches": [{"path": "patch.yaml"}]}
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    build = [require_tool("kustomize"), "build", str(tmp_path)]
    text = subprocess.run(build, capture_output=True, text=True, check=True).stdout
    assert faults(text, KUBERNETES[-1], schemas) == []
    pod = yaml.safe_load(text)["spec"]["template"]["spec"]
    ours, picker = sorted(pod["containers"], key=lambda each: str(each["name"]))
    assert picker == yaml.safe_load(PICKER)["spec"]["template"]["spec"]["containers"][0]
    assert {each["name"] for each in pod["volumes"]} >= {"config", "dispatcher-config"}
    (tmp_path / "remove.yaml").write_text(str(release.one("ConfigMap", "-sidecar")["data"]["remove.yaml"]))
    kustomization["patches"] = [{"path": "patch.yaml"}, {"path": "remove.yaml"}]
    (tmp_path / "kustomization.yaml").write_text(json.dumps(kustomization))
    back = yaml.safe_load(subprocess.run(build, capture_output=True, text=True, check=True).stdout)
    back["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 130
    back["spec"]["template"]["metadata"].pop("annotations", None)
    assert back == yaml.safe_load(PICKER), "nothing of the dispatcher is left in the picker's Deployment"
    assert not {"readinessProbe", "startupProbe"} & set(ours), "the picker's pod must not wait for a queue"
    assert ours["securityContext"]["runAsNonRoot"] is True, "the pod's own context is the picker's"
    assert ours["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert [url.reveal() for url in release.settings().signals.epp.urls] == ["http://127.0.0.1:9090"]


def test_sidecar_s_rights_scrapes_and_service_are_of_the_picker_s_pods() -> None:
    release = case("sidecar")
    for kind in ("RoleBinding", "ClusterRoleBinding"):
        assert [each["name"] for each in release.one(kind)["subjects"]] == ["picker"]
    assert release.one("Service")["spec"]["selector"] == {"app": "picker"}
    assert release.one("PodMonitor")["spec"]["selector"] == {"matchLabels": {"app": "picker"}}


# ── rules ──


def rules(name: str) -> list[dict[str, Any]]:
    groups = case(name).one("PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_promtool_accepts_the_rules(tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps(case("rules").one("PrometheusRule")["spec"]))
    done = subprocess.run(
        [require_tool("promtool"), "check", "rules", file], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"{len(rules('rules'))} rules found" in done.stdout


def test_rules_speak_of_this_release_s_pool_alone() -> None:
    ours = {"namespace": "llm", "pool": "qwen"}
    for rule in rules("rules"):
        for selector in named(rule["expr"]).selectors:
            if "batch_dispatcher" in selector.name:
                assert selector.name in known()
                assert {each.set_label: each.value for each in selector.matchers}.items() >= ours.items()
    (down,) = (rule for rule in rules("rules") if rule.get("alert") == "BatchDispatcherReplicaDown")
    assert 'job=~"llm/night-batch-dispatcher|night-batch-dispatcher"' in down["expr"]


def test_rules_are_otherwise_those_of_the_files() -> None:
    plain = yaml.safe_load((FILES / "rules.yaml").read_text())
    expected = {
        rule.get("alert") or rule["record"]: rule for group in plain["groups"] for rule in group["rules"]
    }
    given = CASES["rules"]["monitoring"]["rules"]["alerts"]
    found = {rule.get("alert") or rule["record"]: rule for rule in rules("rules")}
    assert set(expected) - set(found) == {"BatchDispatcherStarved"}
    for name, rule in found.items():
        wanted = expected[name]
        assert rule.get("annotations", {}).get("summary") == wanted.get("annotations", {}).get("summary")
        if name in given:
            continue
        assert [each.name for each in named(rule["expr"]).selectors] == [
            each.name for each in named(wanted["expr"]).selectors
        ]
        assert (rule.get("for"), rule.get("labels")) == (wanted.get("for"), wanted.get("labels"))
        bare = re.sub(r"\s", "", rule["expr"]).replace('namespace="llm",pool="qwen",', "")
        bare = bare.replace('{namespace="llm",pool="qwen"}', "").replace(
            "llm/night-batch-dispatcher|night-batch-dispatcher", ".*batch-dispatcher.*"
        )
        assert bare == re.sub(r"\s", "", wanted["expr"]).replace('{pool=~".+"}', ""), name
    refusals = found["BatchDispatcherRefusals"]
    assert "> 0.2\n" in refusals["expr"]
    assert (refusals["for"], refusals["labels"]) == ("10m", {"severity": "info"})
    assert refusals["annotations"]["runbook_url"] == "https://wiki/runbook.md#batchdispatcherrefusals"
    assert "[2d]" in found["BatchDispatcherDown"]["expr"]


def test_plain_scrape_of_the_guide_takes_the_dispatcher_s_port_and_no_other(tmp_path: Path) -> None:
    page = (DOCS / "how-to" / "install.md").read_text()
    (text,) = re.findall(r"<!-- scrape -->\n```yaml\n(.*?)```", page, re.DOTALL)
    shutil.copy(FILES / "rules.yaml", tmp_path / "batch-dispatcher-rules.yaml")
    discovery = "kubernetes_sd_configs: [{role: pod}]"  # Debian's is built without
    assert discovery in text
    (tmp_path / "prometheus.yaml").write_text(text.replace(discovery, "static_configs: []"))
    check = [require_tool("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(check, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (job,) = yaml.safe_load(text)["scrape_configs"]
    asked = re.findall(r'job=~"(.+?)"', (FILES / "rules.yaml").read_text())
    assert asked
    assert all(re.fullmatch(each, job["job_name"]) for each in asked)
    taken = [
        (where, found["namespace"])
        for name in ("more-of-everything", "pods-scraped", "queue-of-ours")
        for where, pod in case(name).pods()
        for container in pod["spec"]["containers"]
        for port in container.get("ports", [{"name": ""}])
        if (found := scraped(job, pod["metadata"]["labels"], port["name"]))
    ]
    assert taken == [("Deployment night-batch-dispatcher", "llm")] * 3


def scraped(job: Mapping[str, Any], labels: Mapping[str, str], port: str) -> dict[str, str]:
    """The labels of the target that a port of a pod becomes; none where it is left out."""
    found = {"__meta_kubernetes_namespace": "llm", "__meta_kubernetes_pod_name": "a"}
    found |= {"__meta_kubernetes_pod_container_port_name": port}
    found |= {f"__meta_kubernetes_pod_label_{re.sub('[^a-zA-Z0-9_]', '_', of)}": labels[of] for of in labels}
    for rule in job["relabel_configs"]:
        value = ";".join(found.get(each, "") for each in rule["source_labels"])
        if rule.get("action", "replace") == "replace":
            found[rule["target_label"]] = value
        elif not re.fullmatch(rule["regex"], value):
            return {}
    return found


def test_dashboard_leads_to_the_same_runbook() -> None:
    monitoring = {"runbookUrl": 'https://wiki/"runbook".md', "dashboard": {"enabled": True}}
    (text,) = render({"monitoring": monitoring}).one("ConfigMap", "-dashboard")["data"].values()
    variables = json.loads(text)["templating"]["list"]
    assert [each["query"] for each in variables if each["name"] == "runbook"] == [monitoring["runbookUrl"]]


def test_keda_asks_prometheus_what_it_can_answer(tmp_path: Path) -> None:
    triggers = case("scaled-by-deadlines").one("ScaledObject")["spec"]["triggers"]
    (query,) = (each["metadata"]["query"] for each in triggers if each["type"] == "prometheus")
    for selector in named(query).selectors:
        assert selector.name in known()
    file = tmp_path / "rules.yaml"
    file.write_text(json.dumps({"groups": [{"name": "a", "rules": [{"record": "b", "expr": query}]}]}))
    done = subprocess.run(
        [require_tool("promtool"), "check", "rules", file], capture_output=True, check=False
    )
    assert done.returncode == 0


# ── the queue of the chart ──


def test_valkey_starts_as_the_chart_starts_it(tmp_path: Path) -> None:
    """The real server, with the arguments of the pod: an append-only file in /data, no eviction."""
    try:
        server = find_server()
    except EmbeddedError as error:
        pytest.skip(str(error))
    (container,) = case("queue-of-ours").one("StatefulSet")["spec"]["template"]["spec"]["containers"]
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
        wait_until_sync(lambda: answers(client), what="Valkey answers")
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


def answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False


def test_own_queue_gives_way_to_one_that_is_named() -> None:
    assert case("queue-by-url").all("StatefulSet") == []
    assert render({"valkey": {"enabled": True}}).all("StatefulSet") != []
    kept = render({"valkey": {"persistence": {"keep": False}}}).one("StatefulSet")["spec"]
    assert kept["persistentVolumeClaimRetentionPolicy"]["whenDeleted"] == "Delete"


def test_basic_values_are_no_more_than_what_is_asked_for() -> None:
    assert {f"{a}.{b}" for a, of in BASIC.items() for b in of} == {"pool.name", "gateway.url"}
    assert QUEUE["redis"]["existingSecret"]["name"]
