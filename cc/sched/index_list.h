#ifndef TURBOBUS_SCHED_INDEX_LIST_H_
#define TURBOBUS_SCHED_INDEX_LIST_H_

namespace turbobus::sched {

/// A place in an `IndexList`; a member of the item.
struct ListHook {
  int previous = -1;
  int next = -1;
  bool is_linked = false;
};

/// A doubly linked list of items that live in a vector, linked by their index
/// through the hook `kHook`: no allocation, and removal from the middle takes
/// constant time. The vector is passed in because it may move.
template <typename Item, ListHook Item::* kHook>
class IndexList {
 public:
  bool empty() const { return head_ < 0; }
  int front() const { return head_; }
  int back() const { return tail_; }

  template <typename Items>
  void PushBack(Items& items, int index) {
    InsertAfter(items, index, tail_);
  }

  template <typename Items>
  void PushFront(Items& items, int index) {
    InsertAfter(items, index, -1);
  }

  /// Behind `previous`, or at the front if that is -1.
  template <typename Items>
  void InsertAfter(Items& items, int index, int previous) {
    ListHook& hook = items[index].*kHook;
    const int next = previous < 0 ? head_ : (items[previous].*kHook).next;
    hook = {.previous = previous, .next = next, .is_linked = true};
    (previous < 0 ? head_ : (items[previous].*kHook).next) = index;
    (next < 0 ? tail_ : (items[next].*kHook).previous) = index;
  }

  /// Does nothing if the item is not in the list.
  template <typename Items>
  void Remove(Items& items, int index) {
    ListHook& hook = items[index].*kHook;
    if (!hook.is_linked) return;
    (hook.previous < 0 ? head_ : (items[hook.previous].*kHook).next) =
        hook.next;
    (hook.next < 0 ? tail_ : (items[hook.next].*kHook).previous) =
        hook.previous;
    hook = {};
  }

  template <typename Items>
  static int Next(const Items& items, int index) {
    return (items[index].*kHook).next;
  }

  template <typename Items>
  static int Previous(const Items& items, int index) {
    return (items[index].*kHook).previous;
  }

 private:
  int head_ = -1;
  int tail_ = -1;
};

}  // namespace turbobus::sched

#endif  // TURBOBUS_SCHED_INDEX_LIST_H_
