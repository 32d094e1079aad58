"""Names outside of the project that are known to change nothing but what they return, when a module is imported.

A name that is missing here costs a stage run too many, never one too few.
"""

from __future__ import annotations


def _below(package: str, names: str) -> set[str]:
    return {f"{package}.{name}" for name in names.split()}


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


HOLDERS = frozenset(
    _below("builtins", "dict frozenset list property set staticmethod classmethod tuple")
    | _below("functools", "cache cached_property lru_cache partial wraps")
    | _below("dataclasses", "dataclass field")
    | _below("typing", "NamedTuple NewType TypeVar cast ParamSpec TypeVarTuple")
    | _below("contextlib", "contextmanager asynccontextmanager")
)
"""Calls that keep a function of the project without calling it."""

PURE = HOLDERS | frozenset(
    _below("builtins", "abs all any bool bytes chr complex divmod enumerate float hash int isinstance issubclass len")
    | _below("builtins", "max min object ord pow range repr reversed round slice sorted str sum zip")
    | _below("collections", "ChainMap Counter OrderedDict deque namedtuple")
    | _below("copy", "copy deepcopy")
    | _below("datetime", "date datetime time timedelta timezone")
    | _below("decimal", "Decimal")
    | _below("enum", "auto")
    | _below("fractions", "Fraction")
    | _below("importlib.metadata", "version")
    | _below("importlib.util", "find_spec")
    | _below("itertools", "accumulate chain chain.from_iterable combinations permutations product repeat zip_longest")
    | _below("json", "dumps loads")
    | _below("logging", "getLogger")
    | _below("math", "ceil cos exp floor log log10 log2 prod sin sqrt tanh")
    | _below("numpy", "arange array asarray concatenate dtype exp eye finfo full iinfo linspace log meshgrid ones sqrt")
    | _below("numpy", "stack zeros float32 float64 int32 int64 uint8")
    | _below("operator", "attrgetter itemgetter methodcaller")
    | _below("os", "getenv environ.get path.abspath path.basename path.dirname path.expanduser path.join path.exists")
    | _below("pathlib", "Path Path.cwd Path.home PurePath PurePosixPath")
    | _below("re", "compile escape")
    | _below("string", "Template")
    | _below("struct", "Struct calcsize")
    | _below("numpy.random", "default_rng")
    | _below("torch", "backends.mps.is_available cuda.device_count cuda.is_available")
    | _below("torch.nn", "BCEWithLogitsLoss CrossEntropyLoss L1Loss MSELoss")
    | _below("torch", "arange device eye finfo full iinfo linspace ones stack tensor zeros Size")
    | _below("types", "MappingProxyType SimpleNamespace")
    | _below("typing", "TypedDict")
)
"""Calls that change nothing."""

ITERATORS = frozenset(_below("builtins", "enumerate filter iter map reversed zip"))
"""Calls that give an iterator, which can be read once; so does everything in itertools."""

CONSUMERS = frozenset(
    _below("builtins", "all any bytes dict frozenset list max min set sorted sum tuple")
    | _below("collections", "Counter OrderedDict deque")
    | _below("math", "prod")
)
"""Calls that read an iterator and do not keep it."""

DECORATORS = frozenset(
    _below("builtins", "property staticmethod classmethod")
    | _below("abc", "abstractmethod")
    | _below("contextlib", "contextmanager asynccontextmanager")
    | _below("dataclasses", "dataclass")
    | _below("enum", "unique")
    | _below("functools", "cache cached_property lru_cache total_ordering wraps")
    | _below("torch", "compile enable_grad inference_mode jit.ignore jit.unused no_grad")
    | _below("torch.autograd.function", "once_differentiable")
    | _below("typing", "final no_type_check overload override runtime_checkable")
    | _below("typing_extensions", "deprecated final overload override runtime_checkable")
)
"""Decorators that only wrap or mark what they decorate."""

BASES = _words("""
    abc builtins collections dataclasses datasets enum keras lightning numpy peft pydantic sklearn tokenizers torch
    torchmetrics torchvision trainer_lib transformers typing typing_extensions
""")
"""Packages whose classes keep no list of the classes derived from them."""

QUIET_PACKAGES = BASES | _words("PIL accelerate matplotlib pandas polars pyarrow safetensors scipy seaborn tqdm")
"""Packages that change no other package when they are imported."""

PATCHERS = _words("intel_extension_for_pytorch lovely_tensors sklearnex torch_xla unsloth")
"""Packages that change others when they are imported."""

METHODS = _words("""
    absolute as_posix astype capitalize copy count decode difference encode endswith expanduser format get index
    intersection isdigit items join joinpath keys lower lstrip maketrans numpy partition removeprefix removesuffix
    replace reshape resolve rpartition rsplit rstrip split splitlines startswith strip title to tolist translate
    union unsqueeze upper values view with_name with_suffix zfill
""")
"""Methods of texts, paths, mappings, arrays and tensors that change nothing."""
