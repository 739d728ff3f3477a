"""The `scheduling` section: an EndpointPickerConfig, read piece by piece so that one fault does not hide another."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from proxy.core import params
from proxy.core.errors import Problem
from proxy.core.params import Invalid, join, param, suggestion, unknown
from proxy.scheduling.sections import (
    BY_REPLICAS,
    DETECTOR,
    FLOW_TYPES,
    GRPC_PARSERS,
    MAX_SATURATION,
    NOTIFIED,
    SECTION_TYPES,
    SETTINGS_TYPES,
    SOLE_TYPES,
    DataLayer,
    DataLayerSection,
    FlowControlSection,
    HttpSource,
    MaxSaturationDetector,
    Named,
    Ref,
    RequestHandlerSection,
    settings,
    sheds_while_full,
)

T = TypeVar("T")

API_VERSIONS = ("llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
OLDER_API_VERSIONS = ("config.x-k8s.io/v1alpha1", "config.apix.gateway-api-inference-extension.sigs.k8s.io/v1alpha1")
"""Versions of guides; the document is the same."""
KIND = "EndpointPickerConfig"
FLOW_CONTROL = "flowControl"
YES, NO = ("1", "t", "true"), ("0", "f", "false")
FEATURE_GATES = (FLOW_CONTROL, "haPopulateNonLeaderDatastore")
TOP_LEVEL = (
    *("apiVersion", "kind", "metadata", "featureGates", "plugins", "schedulingProfiles", "dataLayer", "flowControl"),
    *("requestHandler", "parser", "saturationDetector"),
)
UDS = "udsTokenizerConfig"
REFS = ("pluginRef", "fairnessPolicyRef", "orderingPolicyRef", "usageLimitPolicyPluginRef")


@dataclass(frozen=True, slots=True)
class PluginEntry:
    type: str = param(doc="plugin type")
    name: str = param("", "name of the instance; default: the type")
    parameters: Mapping[str, Any] | None = param(None, "parameters of the type")

    @property
    def label(self) -> str:
        return self.name or self.type


@dataclass(frozen=True, slots=True)
class PluginRef:
    plugin_ref: str = param(doc="name of a plugin")
    weight: float | None = param(None, "weight of a scorer; default: 1", at_least=0)


@dataclass(frozen=True, slots=True)
class ProfileEntry:
    name: str
    plugins: tuple[PluginRef, ...]
    shadow: bool
    path: str


@dataclass(frozen=True, slots=True)
class ProfileShell:
    """A profile without its references, which are read one by one."""

    name: str = param(doc="name of the profile")
    plugins: Sequence[Any] = param((), "references to plugins")
    shadow: bool = param(
        False,
        "run the profile after the decision and report its choice without applying it",
        aliases=("shadow-profile",),
    )


@dataclass(frozen=True, slots=True)
class Document:
    """The parsed section. `plugins` are the plugins for the registry; `names` has the type of every name that
    references may use, including faulty ones. `profiles` is None without the section. `flow_control` are values of
    kvlane's own section of that name, `default_flow_control` those without such a section. `problems` are all faults
    that are visible without the registry; `remarks` list parts without effect."""

    plugins: tuple[PluginEntry, ...] = ()
    profiles: tuple[ProfileEntry, ...] | None = None
    data_layer: DataLayer = field(default_factory=DataLayer)
    flow_control: Mapping[str, Any] = field(default_factory=dict)
    default_flow_control: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    problems: tuple[Problem, ...] = ()
    remarks: tuple[Problem, ...] = ()
    path: str = ""


def read(data: Any, path: str = "") -> Document:
    """Read the section at this path. Never raise: faults are in `problems`. None is a missing section."""
    return _Reader(path).read(data)


class _Reader:
    """The state of one `read`, with the problems found so far."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._problems: list[Problem] = []
        self._remarks: list[Problem] = []
        self._names: dict[str, str] = {}
        self._profile_names: set[str] = set()
        self._detectors: set[str] = set()
        """Names of saturation detectors to which profiles refer as filters."""

    def read(self, data: Any) -> Document:
        if not isinstance(data, Mapping):
            if data is not None:
                self._complain("", f"must be a mapping, not {type(data).__name__}")
            return Document(problems=tuple(self._problems), path=self._path)
        self._check_top_level(data)
        gates = self._gates(data.get("featureGates"))
        entries = [entry for index, item in self._items(data, "plugins") if (entry := self._plugin(index, item))]
        profiles = [self._profile(index, item) for index, item in self._items(data, "schedulingProfiles")]
        entries += self._undeclared(data)
        named = self._parameters(entries)
        self._check_request_handler(data)
        flow_control = self._flow_control(data, named, gates)
        is_whole = data.get("kind") == KIND and not gates.get(FLOW_CONTROL)
        return Document(
            plugins=(*(entry for entry in entries if entry.type not in SECTION_TYPES), *self._filters(named)),
            profiles=tuple(profile for profile in profiles if profile) if profiles else None,
            data_layer=self._data_layer(data, named),
            flow_control=flow_control,
            default_flow_control=sheds_while_full(flow_control) if is_whole else flow_control,
            names=self._names,
            problems=tuple(self._problems),
            remarks=tuple(self._remarks),
            path=self._path,
        )

    def _check_top_level(self, data: Mapping[Any, Any]) -> None:
        for key in data:
            if key not in TOP_LEVEL:
                self._complain("", unknown(str(key), TOP_LEVEL))
        if data.get("apiVersion", API_VERSIONS[0]) not in (*API_VERSIONS, *OLDER_API_VERSIONS):
            self._complain("apiVersion", f"must be one of {', '.join(API_VERSIONS)}, not {data['apiVersion']!r}")
        if data.get("kind", KIND) != KIND:
            self._complain("kind", f"must be {KIND}, not {data['kind']!r}")

    def _gates(self, data: Any) -> dict[str, bool]:
        gates = {}
        for index, gate in enumerate(self._list(data, "featureGates")):
            name, equals, value = str(gate).partition("=")
            if name not in FEATURE_GATES:
                known = suggestion(name, FEATURE_GATES)
                self._complain(f"featureGates[{index}]", f"unknown feature gate '{name}'{known}")
            elif equals and value.strip().lower() not in (*YES, *NO):
                self._complain(f"featureGates[{index}]", f"'{name}' must be true or false, not '{value}'")
            gates[name] = value.strip().lower() not in NO
        return gates

    # Plugins and profiles.

    def _plugin(self, index: int, item: Any) -> PluginEntry | None:
        """Return None for a faulty plugin and for an unsupported type; its name may still be referred to."""
        label = _text(item, "name") or _text(item, "type")
        path = f"plugins.{label}" if label else f"plugins[{index}]"
        if label in self._names:
            self._complain(path, "two plugins have this name")
        elif label:
            self._names[label] = _text(item, "type")
        entry = self._load(PluginEntry, item, path)
        if entry is not None and UDS in (entry.parameters or {}):
            self._remark(f"{path}.parameters.{UDS}", "has no effect: the pods tokenise the prompts")
        if entry is None or entry.type not in UNSUPPORTED_TYPES:
            return entry
        if (equivalent := _equivalent(entry)) is None:
            self._complain(path, f"'{entry.type}' {UNSUPPORTED_TYPES[entry.type]}")
        return equivalent

    def _undeclared(self, data: Mapping[Any, Any]) -> Iterator[PluginEntry]:
        """Yield plugins that sections refer to by their type, without a declaration."""
        for section in (FLOW_CONTROL, "dataLayer", "requestHandler", "parser", "saturationDetector"):
            for name in _refs(data.get(section)):
                if name in SECTION_TYPES and name not in self._names:
                    self._names[name] = name
                    yield PluginEntry(name)

    def _parameters(self, entries: Sequence[PluginEntry]) -> Named:
        """Return type and parameters of plugins that configure other packages, by name; None if faulty."""
        named: dict[str, tuple[str, Any]] = {}
        types = set[str]()
        for entry in entries:
            if (kind := SECTION_TYPES.get(entry.type)) is None:
                continue
            path = f"plugins.{entry.label}"
            if entry.type in types & SOLE_TYPES:
                self._complain(path, f"there is another '{entry.type}'; one is enough")
            types.add(entry.type)
            named[entry.label] = (entry.type, self._load(kind.parameters, entry.parameters, f"{path}.parameters"))
            if kind.remark:
                self._remark(path, kind.remark)
        return named

    def _profile(self, index: int, item: Any) -> ProfileEntry | None:
        name = _text(item, "name")
        path = f"schedulingProfiles.{name}" if name else f"schedulingProfiles[{index}]"
        if name and name in self._profile_names:
            self._complain(path, "two profiles have this name")
        self._profile_names.add(name)
        shell = self._load(ProfileShell, item, path)
        refs = self._plugin_refs(item, path)
        return ProfileEntry(shell.name, refs, shell.shadow, join(self._path, path)) if shell else None

    def _plugin_refs(self, profile: Any, path: str) -> tuple[PluginRef, ...]:
        """Return the references to plugins. References to parsers and sources of metrics have no effect."""
        refs = []
        items = profile.get("plugins") if isinstance(profile, Mapping) else None
        for at, item in enumerate(items if isinstance(items, list | tuple) else ()):
            ref = self._load(PluginRef, item, f"{path}.plugins[{at}]")
            where = f"{path}.plugins[{at}].pluginRef"
            if ref is None or not self._check_ref(ref.plugin_ref, where):
                continue
            type_name = self._names[ref.plugin_ref]
            if type_name in FLOW_TYPES and FLOW_TYPES[type_name].role == DETECTOR and type_name != MAX_SATURATION:
                self._detectors.add(ref.plugin_ref)
                refs.append(ref)
            elif type_name in FLOW_TYPES:
                self._complain(where, f"'{ref.plugin_ref}' is no filter, scorer or picker")
            elif type_name not in SETTINGS_TYPES:
                refs.append(ref)
        return tuple(refs)

    def _filters(self, named: Named) -> Iterator[PluginEntry]:
        """Yield the filters that detectors are in profiles."""
        for name in sorted(self._detectors & set(named)):
            if (detector := named[name][1]) is not None:
                yield PluginEntry("utilization-filter", name, detector.as_filter())

    # Sections of other packages.

    def _data_layer(self, data: Mapping[Any, Any], named: Named) -> DataLayer:
        section = self._load(DataLayerSection, data.get("dataLayer"), "dataLayer") or DataLayerSection()
        for key in CROSS_REPLICA:
            if getattr(section, key) is not None:
                self._remark(f"dataLayer.{params.camel(key)}", BY_REPLICAS)
        for index, source in enumerate(section.sources):
            path = f"dataLayer.sources[{index}]"
            self._check_role(source.plugin_ref, f"{path}.pluginRef", "data source")
            for at, extractor in enumerate(source.extractors):
                self._check_role(extractor.plugin_ref, f"{path}.extractors[{at}].pluginRef", "extractor")
        if (discovery := section.discovery) is not None:
            if discovery.peers is not None:
                self._remark("dataLayer.discovery.peers", BY_REPLICAS)
            if discovery.endpoints is not None:
                path = "dataLayer.discovery.endpoints.pluginRef"
                self._check_role(discovery.endpoints.plugin_ref, path, "discovery")
            if discovery.plugin_ref:
                self._check_role(discovery.plugin_ref, "dataLayer.discovery.pluginRef", "discovery")
        for name, (_, parameters) in named.items():
            if isinstance(parameters, HttpSource) and parameters.scheme == "https" and not parameters.ca_cert_path:
                self._remark(f"plugins.{name}.parameters.insecureSkipVerify", VERIFIED)
        fields = {SECTION_TYPES[kind].field: parameters for kind, parameters in named.values()}
        return DataLayer(**{name: parameters for name, parameters in fields.items() if name})

    def _flow_control(self, data: Mapping[Any, Any], named: Named, gates: Mapping[str, bool]) -> Mapping[str, Any]:
        """Return values of kvlane's section `flowControl`. Without the feature gate only the detector has an effect."""
        given, older = data.get(FLOW_CONTROL) or {}, data.get("saturationDetector")
        is_on = gates.get(FLOW_CONTROL, False)
        if isinstance(given, Mapping):
            ignored = [] if is_on else [str(key) for key in given if key != "saturationDetector"]
            if ignored:
                needs = f"has no effect without 'featureGates: [{FLOW_CONTROL}]': {', '.join(ignored)}"
                self._remark(FLOW_CONTROL, needs)
            given = {key: value for key, value in given.items() if str(key) not in ignored}
            given = {"saturationDetector": older, **given} if older else given
        section = self._load(FlowControlSection, given, FLOW_CONTROL)
        flow = {name: each for name, each in named.items() if each[0] in FLOW_TYPES}
        wanted = {name for name, kind in self._names.items() if kind in FLOW_TYPES}
        if section is None or wanted - {name for name, (_, parameters) in flow.items() if parameters is not None}:
            return {}
        refs = [(path, name, role) for path, name, role in section.refs() if name]
        are_right = [self._check_role(name, f"{FLOW_CONTROL}.{path}", role) for path, name, role in refs]
        are_right += [self._check_detectors(name, *each) for name, each in flow.items() if each[0] == MAX_SATURATION]
        return settings(section, flow, is_on) if all(are_right) else {}

    def _check_detectors(self, label: str, _: str, highest: MaxSaturationDetector) -> bool:
        """Return whether the detector combines two others, one of each kind."""
        path = f"plugins.{label}.parameters.detectors"
        are_right = [self._check_role(name, path, DETECTOR) for name in highest.detectors]
        if not all(are_right):
            return False
        kinds = [self._names[name] for name in highest.detectors]
        if MAX_SATURATION in kinds or len(set(kinds)) < len(kinds):
            self._complain(path, "must name at most one utilization-detector and one concurrency-detector")
            return False
        return True

    def _check_request_handler(self, data: Mapping[Any, Any]) -> None:
        section = self._load(RequestHandlerSection, data.get("requestHandler"), "requestHandler")
        if section and section.propagate_priority:
            self._remark("requestHandler.propagatePriority", "has no effect: requests are sent without a priority")
        parsers = [(f"requestHandler.parsers[{at}]", ref) for at, ref in enumerate(section.parsers if section else ())]
        if data.get("parser") is not None and (older := self._load(Ref, data["parser"], "parser")):
            parsers.append(("parser", older))
        for path, ref in parsers:
            self._check_role(ref.plugin_ref, f"{path}.pluginRef", "parser")
        if parsers and all(self._names.get(ref.plugin_ref) in GRPC_PARSERS for _, ref in parsers):
            self._complain(parsers[0][0], ONLY_GRPC)

    # References and pieces.

    def _check_role(self, name: str, path: str, role: str) -> bool:
        """Return whether the name refers to a plugin of this role."""
        if not self._check_ref(name, path):
            return False
        type_name = self._names[name]
        kind = SECTION_TYPES.get(type_name)
        if (kind is not None and kind.role == role) or (role == "extractor" and type_name in NOTIFIED):
            return True
        if type_name not in UNSUPPORTED_TYPES:  # which has a problem already
            self._complain(path, f"'{name}' is no {role}")
        return False

    def _check_ref(self, name: str, path: str) -> bool:
        if name in self._names:
            return True
        names = f"; the names are {', '.join(self._names)}" if self._names else ""
        declare = f"{names}; declare it under {join(self._path, 'plugins')}"
        self._complain(path, f"no plugin is named '{name}'{suggestion(name, list(self._names)) or declare}")
        return False

    def _items(self, data: Mapping[Any, Any], key: str) -> Iterator[tuple[int, Any]]:
        return enumerate(self._list(data.get(key), key))

    def _list(self, data: Any, path: str) -> Sequence[Any]:
        if data is None or (isinstance(data, Sequence) and not isinstance(data, str)):
            return data or ()
        self._complain(path, f"must be a list, not {type(data).__name__}")
        return ()

    def _load(self, cls: type[T], data: Any, path: str) -> T | None:
        try:
            return params.build(cls, params.without_nulls(cls, data), join(self._path, path))
        except Invalid as invalid:
            self._problems.extend(invalid.problems)
            return None

    def _complain(self, path: str, message: str) -> None:
        self._problems.append(Problem(join(self._path, path) if path else self._path, message))

    def _remark(self, path: str, message: str) -> None:
        self._remarks.append(Problem(join(self._path, path), message))


def _text(item: Any, key: str) -> str:
    value = item.get(key) if isinstance(item, Mapping) else None
    return value if isinstance(value, str) else ""


def _refs(value: Any) -> Iterator[str]:
    """Yield all names of plugins that a section refers to."""
    for item in value if isinstance(value, list) else ():
        yield from _refs(item)
    for key, item in value.items() if isinstance(value, Mapping) else ():
        if key in REFS and isinstance(item, str):
            yield item
        yield from _refs(item)


def _equivalent(entry: PluginEntry) -> PluginEntry | None:
    """Return kvlane's plugin that replaces two types of llm-d, if one exists."""
    if entry.type == "data-parallel-profile-handler":  # each rank is an endpoint
        rest = {key: value for key, value in (entry.parameters or {}).items() if key != "primaryPort"}
        return PluginEntry("single-profile-handler", entry.label, rest)
    if entry.type == "by-label-selector":  # deprecated, and the same
        return PluginEntry("label-selector-filter", entry.label, entry.parameters)
    return None


NOT_YET = "is not yet supported"
VERIFIED = "has no effect: certificates are verified; see `pods.tls`"
ONLY_GRPC = (
    "is not supported alone, because requests and pods use HTTP: add openai-parser, and use the HTTP port of the pods"
)
CROSS_REPLICA = (
    *("peer_discovery", "cross_replica", "cross_replica_syncer_plugin_ref", "cross_replica_sync_interval"),
    "cross_replica_publish_timeout",
)
"""Fields of the section `dataLayer` for the exchange of state between replicas."""

RENAMED_TYPES = {
    "by-label-selector": "label-selector-filter",
    "kv-cache-scorer": "kv-cache-utilization-scorer",
    "max-score": "max-score-picker",
    "model-server-protocol-metrics": "core-metrics-extractor",
    "predicted-latency-scorer": "latency-scorer",
    "prefix-cache": "prefix-cache-scorer",
    "running-queue-size-scorer": "running-requests-size-scorer",
    "single-profile": "single-profile-handler",
}
"""Plugin types of earlier releases, which `kvlane import` renames."""

UNSUPPORTED_TYPES: Mapping[str, str] = {
    "data-parallel-profile-handler": NOT_YET,
    **dict.fromkeys(
        ("disaggregatedset-rollout-pod-extractor", "disaggregatedset-rollout-screener"),
        "is not supported: give the pods of each revision a pool of their own, so that they only work with each other",
    ),
    **dict.fromkeys(
        (
            "multicluster-approx-prefix-cache-producer",
            "multicluster-file-discovery",
            "multicluster-kv-cache-utilization-scorer",
            "multicluster-metrics-data-source",
            "multicluster-metrics-extractor",
            "multicluster-prefix-cache-scorer",
            "multicluster-queue-scorer",
            "multicluster-session-affinity-filter",
        ),
        "is not supported: list the gateways of the clusters as pods, use the type without 'multicluster-', and name "
        "the metrics of their pools in engineConfigs of core-metrics-extractor",
    ),
    "thunder-agent": "is not supported: program-aware-fairness orders programs, session-affinity-scorer keeps them on "
    "their pods, and flowControl.maxTokensPerPod limits the prompt tokens in flight",
    **{old: f"was renamed to {new}" for old, new in RENAMED_TYPES.items()},
    "decision-tree-filter": "no longer exists; list the filters one after the other in a profile",
    "least-kv-cache-filter": "no longer exists; use kv-cache-utilization-scorer",
    "least-queue-filter": "no longer exists; use queue-scorer",
    "lora-affinity-filter": "no longer exists; use lora-affinity-scorer",
    "low-queue-filter": "no longer exists; use queue-scorer, or utilization-filter with "
    "'conditions: [{metric: waiting-queue, maxValue: 128}]'",
}
"""Types of llm-d, or of earlier releases of the Gateway API inference scheduler, and the alternative to each."""
