"""The table of all families that are known; a new one is a line here and a file."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType

from moewright.families.afmoe import AFMOE
from moewright.families.bailing import LING, LING2
from moewright.families.deepseek import DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32, KIMI_K2
from moewright.families.deepseek_v4 import DEEPSEEK_V4
from moewright.families.dots import DOTS1, SOLAR_OPEN
from moewright.families.ernie import ERNIE
from moewright.families.glm import GLM4_MOE, GLM4_MOE_LITE, GLM_MOE_DSA
from moewright.families.gpt2 import GPT2
from moewright.families.gpt_oss import GPT_OSS
from moewright.families.granite import GRANITE, GRANITE_SHARED
from moewright.families.grok import GROK1
from moewright.families.hunyuan import HUNYUAN, HY3
from moewright.families.jamba import JAMBA
from moewright.families.kimi_linear import KIMI_LINEAR
from moewright.families.llama import LLAMA, MISTRAL, SMOLLM3
from moewright.families.llama4 import LLAMA4
from moewright.families.minimax import MINIMAX_M2
from moewright.families.mixtral import MIXTRAL
from moewright.families.nemotron import NEMOTRON, NEMOTRON_H
from moewright.families.olmo import FLEX_OLMO, OLMO3, OLMOE
from moewright.families.phimoe import PHIMOE
from moewright.families.qwen import QWEN2, QWEN2_MOE, QWEN3, QWEN3_MOE, QWEN3_VL
from moewright.families.qwen_hybrid import QWEN3_5, QWEN3_NEXT
from moewright.families.record import Family, Parts
from moewright.spec.errors import BadInput, Reason
from moewright.spec.extensions import ExtensionPoint, list_extensions, load_extension

_ALL = (
    *(MIXTRAL, QWEN2_MOE, QWEN3_MOE, QWEN3_VL, OLMOE, FLEX_OLMO, GPT_OSS),
    *(DEEPSEEK_V2, DEEPSEEK_V3, KIMI_K2, DOTS1, GLM4_MOE, GLM4_MOE_LITE, SOLAR_OPEN),
    *(AFMOE, MINIMAX_M2, ERNIE, HUNYUAN, LING, LING2, PHIMOE, JAMBA, HY3, GRANITE, GRANITE_SHARED),
    *(LLAMA4, GROK1, QWEN3_NEXT, QWEN3_5, KIMI_LINEAR, NEMOTRON_H),
    *(DEEPSEEK_V32, GLM_MOE_DSA, DEEPSEEK_V4),
    *(LLAMA, MISTRAL, QWEN2, QWEN3, SMOLLM3, OLMO3, NEMOTRON, GPT2),
)
# Our own, by the model_type of config.json.
FAMILIES: Mapping[str, Family] = MappingProxyType({family.model_type: family for family in _ALL})
_UNKNOWN = Family(model_type="", config=Parts(parts=()))


@cache
def known_families() -> Mapping[str, Family]:
    """Return our own families and those of installed packages, by model type.

    Raises:
        BadInput: a package cannot be imported, or adds something else than a new family.
    """
    added = {}
    for name in list_extensions(ExtensionPoint.FAMILIES):
        family = load_extension(ExtensionPoint.FAMILIES, name)
        rule = ""
        if not isinstance(family, Family):
            rule = "is no Family of moewright.families.record"
        elif family.model_type in FAMILIES:
            rule = f"has the model_type {family.model_type}, which is a family already"
        if rule:
            raise BadInput(Reason(field=ExtensionPoint.FAMILIES, value=name, rule=rule))
        added[family.model_type] = family
    return MappingProxyType({**FAMILIES, **added})


def nested_families() -> Mapping[str, Family]:
    """Return the families of language models inside of `text_config`, by the outer model type."""
    families = known_families().values()
    return {outer: family for family in families for outer in family.nested_in}


def find_family(model_type: str) -> Family:
    """Return the record of a family; one without a property for a model of none that is known."""
    # Our own first: no package is imported for them.
    return FAMILIES.get(model_type) or known_families().get(model_type, _UNKNOWN)
