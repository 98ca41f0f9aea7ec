"""The part of the schemas of KubeRay (ray.io/v1) and the Prometheus operator that is used here.

Written from their published API references; keys that are not listed are refused, so that a
misspelt one is found.
"""


def table(required=(), **properties):
    """Return an object with these keys and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def of(kind, names):
    """Return keys, given as words, of one kind."""
    return dict.fromkeys(names.split(), kind)


def lists(items, least=1):
    return {"type": "array", "items": items, "minItems": least}


TEXT, NUMBER, TRUTH = {"type": "string"}, {"type": "integer", "minimum": 0}, {"type": "boolean"}
TEXTS = {"type": "object", "additionalProperties": TEXT}
META = table(["name"], name=TEXT, labels=TEXTS, namespace=TEXT)
UNITS = {"cpu": "(m)?", "memory": "(Mi|Gi)", "nvidia.com/gpu": "", "storage": "(Gi|Ti)"}
AMOUNTS = table(
    **{kind: {"type": "string", "pattern": rf"^\d+{unit}$"} for kind, unit in UNITS.items()}
)
RESOURCES = table(requests=AMOUNTS, limits=AMOUNTS)
KEY_OF_SECRET = table(["name", "key"], name=TEXT, key=TEXT)
AUTHORIZATION = table(["credentials"], credentials=KEY_OF_SECRET)
PROBE = table(
    exec=table(["command"], command=lists(TEXT)),
    httpGet=table(["path", "port"], path=TEXT, port=TEXT),
    **of(NUMBER, "initialDelaySeconds periodSeconds timeoutSeconds failureThreshold"),
)
CONTAINER = table(
    ["name", "image", "resources"],
    **of(TEXT, "name image"),
    ports=lists(
        table(
            ["containerPort"],
            containerPort={"type": "integer", "minimum": 1, "maximum": 65535},
            name={"type": "string", "pattern": r"^[a-z0-9-]{1,15}$"},
        )
    ),
    resources=RESOURCES,
    volumeMounts=lists(table(["name", "mountPath"], name=TEXT, mountPath=TEXT)),
    command=lists(TEXT),
    env=lists(table(["name", "valueFrom"], name=TEXT, valueFrom=table(secretKeyRef=KEY_OF_SECRET))),
    lifecycle=table(preStop=table(["exec"], exec=table(["command"], command=lists(TEXT)))),
    **of(PROBE, "startupProbe livenessProbe readinessProbe"),
    securityContext=table(capabilities=table(add=lists(TEXT))),
)
VOLUME = table(
    ["name"],
    name=TEXT,
    emptyDir=table(medium={"enum": ["Memory", ""]}, sizeLimit=TEXT),
    persistentVolumeClaim=table(["claimName"], claimName=TEXT),
)
SECURITY = table(runAsNonRoot=TRUTH, runAsUser=NUMBER, fsGroup=NUMBER)
TEMPLATE = table(
    ["spec"],
    spec=table(
        ["containers"],
        containers=lists(CONTAINER),
        restartPolicy={"enum": ["OnFailure", "Never"]},
        volumes=lists(VOLUME),
        securityContext=SECURITY,
        shareProcessNamespace=TRUTH,
        terminationGracePeriodSeconds=NUMBER,
        tolerations=lists(
            table(
                ["key", "operator"],
                **of(TEXT, "key value"),
                operator={"enum": ["Exists", "Equal"]},
                effect={"enum": ["NoSchedule", "PreferNoSchedule", "NoExecute"]},
            )
        ),
    ),
)
RELABELINGS = lists(
    table(["sourceLabels", "targetLabel"], sourceLabels=lists(TEXT), regex=TEXT, targetLabel=TEXT)
)
ENDPOINTS = lists(table(["port"], port=TEXT, interval=TEXT, relabelings=RELABELINGS))
GROUP = {"labels": TEXTS, "rayStartParams": TEXTS, "template": TEMPLATE}
SCHEMAS = {
    ("ray.io/v1", "RayCluster"): table(
        ["headGroupSpec"],
        rayVersion=TEXT,
        authOptions=table(["mode"], mode={"enum": ["token", "disabled"]}),
        headGroupSpec=table(
            ["template"], serviceType={"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, **GROUP
        ),
        workerGroupSpecs=lists(
            table(
                ["groupName", "template", "maxReplicas", "minReplicas"],
                groupName=TEXT,
                **of(NUMBER, "replicas minReplicas maxReplicas"),
                **GROUP,
            )
        ),
    ),
    ("ray.io/v1", "RayJob"): table(
        ["entrypoint"],
        **of(TEXT, "entrypoint runtimeEnvYAML"),
        backoffLimit=NUMBER,
        shutdownAfterJobFinishes=TRUTH,
        clusterSelector=TEXTS,
    ),
    ("batch/v1", "Job"): table(["template"], backoffLimit=NUMBER, template=TEMPLATE),
    ("v1", "PersistentVolumeClaim"): table(
        ["accessModes", "resources"],
        accessModes=lists({"enum": ["ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany"]}),
        resources=RESOURCES,
    ),
    ("monitoring.coreos.com/v1", "ServiceMonitor"): table(
        ["endpoints", "selector"],
        jobLabel=TEXT,
        selector=table(matchLabels=TEXTS),
        endpoints=ENDPOINTS,
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): table(
        ["podMetricsEndpoints", "selector"],
        selector=table(matchLabels=TEXTS),
        podMetricsEndpoints=ENDPOINTS,
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): table(
        groups=lists(
            table(
                ["name", "rules"],
                name=TEXT,
                rules=lists(
                    table(
                        ["alert", "expr"],
                        **of(TEXTS, "labels annotations"),
                        **of(TEXT, "alert expr for keep_firing_for"),
                    )
                ),
            )
        )
    ),
    ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): table(
        scrapeInterval=TEXT,
        httpSDConfigs=lists(
            table(["url"], url=TEXT, refreshInterval=TEXT, authorization=AUTHORIZATION)
        ),
        authorization=AUTHORIZATION,
        relabelings=RELABELINGS,
    ),
}
KUSTOMIZATION = table(
    ["apiVersion", "kind"],
    apiVersion={"const": "kustomize.config.k8s.io/v1beta1"},
    kind={"const": "Kustomization"},
    resources=lists(TEXT),
    images=lists(table(["name", "newTag"], name=TEXT, newTag=TEXT)),
    configMapGenerator=lists(table(["name", "files"], name=TEXT, files=lists(TEXT))),
    generatorOptions=table(disableNameSuffixHash=TRUTH, labels=TEXTS),
)


def manifest(document):
    """Return the schema of a whole document, by its kind."""
    spec = SCHEMAS[document["apiVersion"], document["kind"]]
    keys = {**of(TEXT, "apiVersion kind"), "metadata": META, "spec": spec}
    return table(keys, **keys)
