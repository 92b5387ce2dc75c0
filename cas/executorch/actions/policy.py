"""What a backend is known not to look at: the only things that a key may leave out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Final, Literal

#: ``node.meta`` entries that hold paths, line numbers, ids of graphs or counters of this process.
#: All else in ``node.meta`` is an input: a new kind of entry gives a miss, never a wrong hit.
NOISE: Final = frozenset(
    {
        "arg_kwarg_vals",
        "autograd_backward",
        "desc",
        "eager_input_vals",
        "from_node",
        "seq_nr",
        "stack_trace",
    }
)

#: Bookkeeping of the partitioner about a node that calls a partition; none is inside of one.
LOWERING: Final = frozenset({"backend_id", "compile_spec", "submodule_program"})

#: Where a node came from. Stable from run to run, and some backends read it.
ORIGIN: Final = frozenset(
    {
        "fwd_nn_module_stack",
        "fwd_source_fn_stack",
        "nn_module_stack",
        "source_fn_stack",
        "torch_fn",
    }
)

#: Names of partitions, which count through the whole model.
TAGS: Final = frozenset({"delegation_tag", "partitioner_tag"})


@dataclass(frozen=True, slots=True)
class KeyPolicy:
    """What goes into a key. The default is everything that has a stable form.

    Attributes:
        names: names of nodes, parameters, buffers and methods.
        handles: debug handles by value ("exact"), by the pattern in which those of operators
            repeat ("pattern", so the result must be relocated), or not at all ("ignored").
        hints: example values of symbolic sizes.
        groups: which nodes came from the same node of the original program; debug handles are
            made of that.
        example_inputs: whether the values of a program's example inputs count, or only their
            types and shapes.
        kept: entries of ``NOISE`` that the backend does read.
        dropped: other entries of ``node.meta`` that it is proven not to read.
    """

    names: bool = True
    handles: Literal["exact", "pattern", "ignored"] = "exact"
    hints: bool = True
    groups: bool = False
    example_inputs: bool = True
    kept: frozenset[str] = field(default_factory=frozenset)
    dropped: frozenset[str] = field(default_factory=frozenset)

    def skipped(self) -> frozenset[str]:
        """The entries of ``node.meta`` that do not count."""
        return (NOISE - self.kept) | LOWERING | self.dropped

    def describe(self) -> str:
        """One line that differs for every two different policies."""
        return (
            f"names={self.names:d} handles={self.handles} hints={self.hints:d} "
            f"groups={self.groups:d} example_inputs={self.example_inputs:d} "
            f"kept={','.join(sorted(self.kept))} dropped={','.join(sorted(self.dropped))}"
        )


#: For every backend that is not known better.
STRICT: Final = KeyPolicy()

#: For whole exports: what lowering reads of a program that ``torch.export`` made.
WHOLE_EXPORT: Final = replace(STRICT, groups=True, example_inputs=False)
