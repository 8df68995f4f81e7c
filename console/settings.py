"""Settings of every Django process, read from the environment here; NAME_FILE may hold NAME (`workers.environment`).

SLACKLINE_ROLE says which process this is: `console` (default: ASGI, pooled connections, all apps), `gateway`, `worker`
and `beat` (the ORM and our models alone, plain persistent connections), `manage` (all apps, plain connections).
"""

from __future__ import annotations

from pathlib import Path

from django.core.exceptions import ImproperlyConfigured

from console.environment import Environment, embedded_ports
from console.proxies import networks
from controller.core.addresses import OWN_URLS, USUAL_NETWORKS, address_rules, own_services
from controller.core.errors import ConfigError
from controller.core.types import LONGEST_ANSWER_S
from controller.engine.placement import dashboards
from controller.postgres.bounded import BoundedConnection
from workers.http.details import SHORTEST_TOKEN
from workers.ray.clusters import clusters as ray_clusters

HSTS_S = 30 * 86_400
BASE_DIR = Path(__file__).resolve().parent.parent
_env = Environment()

ROLE = _env.choice("SLACKLINE_ROLE", "console", ("console", "gateway", "worker", "beat", "manage"))
DEBUG = _env.flag("DEBUG", False)
DATA_DIR = Path(_env.text("DATA_DIR", str(BASE_DIR / ".data"))).resolve()
SECRET_KEY = _env.secret("SECRET_KEY", kept_in=DATA_DIR / "secret_key")

# ---- where things are --------------------------------------------------------------------------------------------
FLEET_TOKEN = _env.text("FLEET_TOKEN", "")  # what engines must hear before they load or give weights
METRICS_TOKEN = _env.text("METRICS_TOKEN", "")  # for /metrics and the details of /healthz; "": this machine alone
if 0 < len(METRICS_TOKEN) < SHORTEST_TOKEN:
    raise ImproperlyConfigured(f"METRICS_TOKEN: shorter than {SHORTEST_TOKEN} characters")
# API keys of registered engines; gateways and jobs read it by themselves too (workers/http/engine_keys.py).
ENGINE_KEYS_DIR = Path(_env.text("ENGINE_KEYS_DIR", str(DATA_DIR / "engine-keys")))
# Where engines may be. Jobs and gateways read it by themselves too, where they connect (workers/http/outbound.py).
try:
    _own = [*(_env.text(name, "") for name in OWN_URLS), *(url for _, url in dashboards(_env.text("RAY_ADDRESS", "")))]
    ENGINE_NETWORKS = address_rules(_env.names("ENGINE_NETWORKS", USUAL_NETWORKS), own_services(_own))
except ConfigError as _error:
    raise ImproperlyConfigured(f"ENGINE_NETWORKS: {_error}") from None
RAY_ADDRESS = _env.text("RAY_ADDRESS", "")  # of clusters that may start engines; their tokens are in files
RAY_TOKENS_DIR = Path(_env.text("RAY_TOKENS_DIR", str(DATA_DIR / "ray-tokens")))
try:
    ray_clusters(RAY_ADDRESS, RAY_TOKENS_DIR)  # checked only: the provisioner reads the tokens again, as they change
except ConfigError as _error:
    raise ImproperlyConfigured(str(_error)) from None
MEDIA_HOSTS = _env.names("MEDIA_HOSTS")  # of images, video and sound that a request may name by an https:// URL
GATEWAY_PORT = _env.whole("GATEWAY_PORT", 8080, 1, 65535)
CONSOLE_PORT = _env.whole("CONSOLE_PORT", 8000, 1, 65535)
GATEWAY_URL = _env.url("GATEWAY_URL", f"http://127.0.0.1:{GATEWAY_PORT}", ("http", "https"))
GATEWAY_PUBLIC_URL = _env.url("GATEWAY_PUBLIC_URL", GATEWAY_URL, ("http", "https"))
CONSOLE_URL = _env.url("CONSOLE_URL", f"http://127.0.0.1:{CONSOLE_PORT}", ("http", "https"))
_embedded = embedded_ports(DATA_DIR) if ROLE == "manage" else {}  # for what is typed beside a running `make up`
REDIS_URL = _env.url("REDIS_URL", f"redis://127.0.0.1:{_embedded.get('redis', 6379)}/0", ("redis", "rediss"))

ALLOWED_HOSTS = _env.names("ALLOWED_HOSTS", "localhost,127.0.0.1,[::1]")
CSRF_TRUSTED_ORIGINS = _env.names("CSRF_TRUSTED_ORIGINS")
for _origin in CSRF_TRUSTED_ORIGINS:
    if "://" not in _origin:
        raise ImproperlyConfigured(f"CSRF_TRUSTED_ORIGINS: {_origin!r} needs its scheme (https://...)")
SECURE_COOKIES = _env.flag("SECURE_COOKIES", CONSOLE_URL.startswith("https://"))
HTTPS_ONLY = _env.flag("HTTPS_ONLY", CONSOLE_URL.startswith("https://"))
SECURE_SSL_REDIRECT = HTTPS_ONLY
SECURE_REDIRECT_EXEMPT = [r"^healthz$", r"^metrics$"]  # probes and `make up` call the process itself, past the proxy
SECURE_HSTS_SECONDS = HSTS_S if HTTPS_ONLY else 0
# Whether other hosts of the domain are https only, and in the browsers' list, is for the domain's owner to say.
SILENCED_SYSTEM_CHECKS = ["security.W005", "security.W021"]
try:
    TRUSTED_PROXIES = networks(_env.names("TRUSTED_PROXIES", "127.0.0.1,::1"))
except ValueError as error:
    raise ImproperlyConfigured(f"TRUSTED_PROXIES: {error}; expected addresses or networks (10.0.0.0/8)") from None

# ---- times, in seconds -------------------------------------------------------------------------------------------
DRAIN_TIMEOUT_S = _env.number("DRAIN_TIMEOUT_S", LONGEST_ANSWER_S, 1.0, 86400.0)  # then requests are cut off
TELEMETRY_PERIOD_S = _env.number("TELEMETRY_PERIOD_S", 1.0, 0.05, 5.0)
QUEUE_BODY_MIB = _env.whole("QUEUE_BODY_MIB", 64, 4, 65536)  # of all open requests of one gateway
TENANT_QUEUE_SHARE = _env.number("TENANT_QUEUE_SHARE", 0.5, 0.01, 1.0)  # of those, and of their number, for one tenant
RECORDS_BUFFER_MIB = _env.whole("RECORDS_BUFFER_MIB", 64, 1, 65536)  # records of one gateway that are in memory only
RECORDS_SPOOL_MIB = _env.whole("RECORDS_SPOOL_MIB", 1024, 1, 1 << 20)  # records of one gateway on disk
NEW_TENANT_RPM = _env.whole("NEW_TENANT_RPM", 6_000, 0, 2**31 - 1) or None  # quotas of new tenants; 0: no limit
NEW_TENANT_TPM = _env.whole("NEW_TENANT_TPM", 6_000_000, 0, 2**31 - 1) or None
NEW_TENANT_CONCURRENCY = _env.whole("NEW_TENANT_CONCURRENCY", 500, 0, 2**31 - 1) or None
CONFIG_MAX_AGE_S = _env.number("CONFIG_MAX_AGE_S", 12 * 3600.0, 60.0, 30 * 86400.0)  # then gateways accept no key
DATABASE_TIMEOUT_S = _env.number("DATABASE_TIMEOUT_S", 5.0, 1.0, 3600.0)  # no answer: the connection is given up
RECORDS_KEPT_DAYS = _env.whole("RECORDS_KEPT_DAYS", 30, 1, 3650)
ROLLUP_KEPT_DAYS = _env.whole("ROLLUP_KEPT_DAYS", 400, 2, 3650)  # minutes behind charts and error budgets
if ROLLUP_KEPT_DAYS < RECORDS_KEPT_DAYS:
    raise ImproperlyConfigured("ROLLUP_KEPT_DAYS: at least RECORDS_KEPT_DAYS, for searches begin in the roll-up")
ACTIONS_KEPT_DAYS = _env.whole("ACTIONS_KEPT_DAYS", 90, 1, 3650)
DECISIONS_KEPT_DAYS = _env.whole("DECISIONS_KEPT_DAYS", 400, 0, 36500)  # of jobs; those of people, and 0: forever
if 0 < DECISIONS_KEPT_DAYS < 30:
    raise ImproperlyConfigured("DECISIONS_KEPT_DAYS: at least 30, or 0 forever")

# ---- dispatching -----------------------------------------------------------------------------------------------------
# A name of dispatch.POLICY_SETS, its changes by part, e.g. {"pacing": {"window": 12}}; workers.settings_check builds it
DISPATCH_POLICY = _env.text("DISPATCH_POLICY", "slackline")
DISPATCH_OVERRIDES = _env.mapping("DISPATCH_OVERRIDES")
TOKEN_PACING = _env.number("TOKEN_PACING", 0.0, 0.0, 1.0)  # share of the TPOT target; 0: tokens leave as they come

# ---- database ----------------------------------------------------------------------------------------------------
# A pool under ASGI, where each request has a thread context (so a connection) of its own; plain connections elsewhere.
BoundedConnection.patience_s = DATABASE_TIMEOUT_S if ROLE != "manage" else max(DATABASE_TIMEOUT_S, 600.0)
_port = _embedded.get("postgres", 5432)
_database = _env.database("DATABASE_URL", f"postgresql://postgres@127.0.0.1:{_port}/slackline")
_options = {"connect_timeout": 5, "application_name": f"slackline-{ROLE}"} | _database["OPTIONS"]
if ROLE in ("console", "gateway"):  # the server too gives up what its client no longer waits for
    _ours = f"-c statement_timeout={int(DATABASE_TIMEOUT_S * 1000)}"
    _options["options"] = f"{_options.get('options', '')} {_ours}".strip()
_database["OPTIONS"] = _options
if ROLE == "console":
    _database["OPTIONS"]["pool"] = {"min_size": 1, "max_size": 8, "timeout": 2}
DATABASES = {
    "default": {
        "ENGINE": "controller.postgres",
        "CONN_MAX_AGE": 60 if ROLE in ("worker", "beat", "gateway") else 0,
        "CONN_HEALTH_CHECKS": True,
        **_database,
    }
}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# ---- apps --------------------------------------------------------------------------------------------------------
_DATA_APPS = ["django.contrib.contenttypes", "django.contrib.auth", "controller.apps.ControllerConfig"]
_PAGE_APPS = [
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "console.admin_config.RoleAdminConfig",
    "rest_framework",
    "drf_spectacular",
    "drf_spectacular_sidecar",
    "channels",
    "console",
]
INSTALLED_APPS = _DATA_APPS if ROLE in ("gateway", "worker", "beat") else [*_DATA_APPS, *_PAGE_APPS]

MIDDLEWARE = [
    "console.middleware.request_timing",
    "console.middleware.security_headers",
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "console.sessions.SessionUse",
    "console.middleware.DatabaseAway",
    "console.middleware.UnstorableInput",
]
ROOT_URLCONF = "console.urls"
ASGI_APPLICATION = "console.asgi.application"
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.navigation.navigation",
            ],
        },
    }
]

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]

# ---- people ------------------------------------------------------------------------------------------------------
LOGIN_URL = "/login/"
LOGIN_REDIRECT_URL = "/"
LOGOUT_REDIRECT_URL = "/login/"
_RULES = "django.contrib.auth.password_validation."
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": f"{_RULES}MinimumLengthValidator", "OPTIONS": {"min_length": 12}},
    {"NAME": f"{_RULES}CommonPasswordValidator"},
    {"NAME": f"{_RULES}NumericPasswordValidator"},
    {"NAME": f"{_RULES}UserAttributeSimilarityValidator"},
]
SIGN_INS_PER_ACCOUNT = _env.whole("SIGN_INS_PER_ACCOUNT", 10, 1, 10_000)  # failures in 15 minutes
SIGN_INS_PER_ADDRESS = _env.whole("SIGN_INS_PER_ADDRESS", 30, 1, 100_000)
SESSION_ENGINE = "console.sessions"
SESSION_IDLE_HOURS = _env.number("SESSION_IDLE_HOURS", 12.0, 0.1, 168.0)  # without use a session ends then
SESSION_DAYS = _env.number("SESSION_DAYS", 7.0, 0.1, 90.0)  # and then whatever its use
SESSION_COOKIE_AGE = int(SESSION_DAYS * 86400)
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = SECURE_COOKIES
SESSION_COOKIE_NAME = f"slackline_session_{CONSOLE_PORT}"  # two copies on one host do not log each other out
CSRF_COOKIE_NAME = f"slackline_csrf_{CONSOLE_PORT}"
X_FRAME_OPTIONS = "DENY"
CSRF_FAILURE_VIEW = "console.views.site.problems.csrf_failed"

# ---- live pages and API ------------------------------------------------------------------------------------------
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [REDIS_URL], "prefix": "slackline.channels"},
    }
}
REST_FRAMEWORK = {
    "DEFAULT_SCHEMA_CLASS": "api.control.framework.documented.OperationSchema",
    "DEFAULT_RENDERER_CLASSES": ["rest_framework.renderers.JSONRenderer"],
    "DEFAULT_PARSER_CLASSES": ["rest_framework.parsers.JSONParser"],
    "EXCEPTION_HANDLER": "api.control.framework.errors.exception_handler",
}
SPECTACULAR_SETTINGS = {
    "TITLE": "Slackline",
    "VERSION": "1",
    "DESCRIPTION": (
        "Control API (`/api/v1`): configuration, instances, records, decisions and experiments. "
        "Data path (`/v1`): OpenAI's API with SLO fields.\n\n"
        "Lists come in pages: `items`, and `next_cursor` for the next page. Objects that can be changed have a "
        "`version`. A change says on which version it is based, in the body or as `If-Match`. If somebody else has "
        "changed the object since, it gets 412 `version_conflict` with the stored object and the differences. "
        "Every change is recorded in the audit with its actor. "
        "All errors have one shape: `error.code`, `error.message`, `error.fields`."
    ),
    "SERVE_INCLUDE_SCHEMA": False,
    "SCHEMA_PATH_PREFIX": "/api/v1",
    "COMPONENT_SPLIT_REQUEST": True,
    "SWAGGER_UI_DIST": "SIDECAR",
    "SWAGGER_UI_FAVICON_HREF": "SIDECAR",
    "SWAGGER_UI_SETTINGS": {"deepLinking": True, "docExpansion": "none"},
    "ENUM_NAME_OVERRIDES": {
        "TenantState": "controller.models.Tenant.State",
        "LinkState": "controller.models.Link.State",
        "InstanceLinkState": "controller.models.links.STATES",
        "RequestOutcome": "controller.models.records.OUTCOMES",
        "KvTransferOutcome": "controller.models.links.OUTCOME_CHOICES",
        "KvTransferState": "controller.models.links.REACHED_CHOICES",
        "SimulationState": "controller.models.Experiment.State",
        "WorkflowState": "controller.selectors.records.workflows.STATES",
        "ComponentState": "api.control.health.STATES",
        "WeightSource": "api.control.instances.SOURCES",
        "RoleEnum": "controller.models.fleet.Role",
    },
    "PATH_CONVERTER_OVERRIDES": {"anything": {"type": "string"}},
    "POSTPROCESSING_HOOKS": [
        "drf_spectacular.hooks.postprocess_schema_enums",
        "api.control.openapi.document.add_data_path",
    ],
}

# ---- time, language, logs ----------------------------------------------------------------------------------------
USE_TZ = True
TIME_ZONE = "UTC"
USE_I18N = False
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"line": {"format": "{asctime} {levelname} {name}: {message}", "style": "{"}},
    "filters": {
        "one_line": {"()": "workers.log_lines.OneLine"},
        "answered": {"()": "workers.log_lines.WithoutTraceback"},
    },
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "line", "filters": ["one_line"]}},
    "root": {"handlers": ["stderr"], "level": _env.choice("LOG_LEVEL", "INFO", ("DEBUG", "INFO", "WARNING", "ERROR"))},
    "loggers": {
        "django.server": {"handlers": ["stderr"], "propagate": False},
        "django.request": {"filters": ["answered"]},
    },
}
