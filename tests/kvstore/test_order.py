import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.order import LinkedOrder


@given(
    st.lists(
        st.tuples(st.sampled_from(["append", "remove", "renew", "discard"]), st.integers(0, 9))
    )
)
def test_an_order_behaves_like_a_list(operations):
    order, model = LinkedOrder(), []
    order.reserve(10)
    for name, slot in operations:
        if name == "append" and slot not in model:
            order.append(slot)
            model.append(slot)
        elif name == "renew":
            order.renew(slot)
            if slot in model:
                model.append(model.pop(model.index(slot)))
        elif name in ("remove", "discard") and (slot in model or name == "discard"):
            getattr(order, name)(slot)
            model = [each for each in model if each != slot]
        assert list(order) == model
        assert len(order) == len(model)
        assert all((each in order) == (each in model) for each in range(10))


def test_the_member_just_yielded_may_be_removed():
    order = LinkedOrder()
    order.reserve(4)
    for slot in range(4):
        order.append(slot)
    for slot in order:
        order.remove(slot)
    assert list(order) == []


def test_a_member_cannot_be_appended_twice_nor_removed_once_gone():
    order = LinkedOrder()
    order.reserve(1)
    order.append(0)
    with pytest.raises(AssertionError):
        order.append(0)
    order.remove(0)
    with pytest.raises(AssertionError):
        order.remove(0)
