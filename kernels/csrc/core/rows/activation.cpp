#include "core/rows/activation.h"

#include <algorithm>
#include <cmath>
#include <mutex>
#include <vector>

#include "core/cpu/threads.h"
#include "core/rows/rows.h"

namespace octet {
namespace {

constexpr int64_t kBlock = BinCounter::kBlock;
// Rows of channels whose sums are added up before those of others: fixed, so that threads change no sum.
constexpr int64_t kValuesPerGroup = 1 << 15;

int64_t divided_up(int64_t n, int64_t by) { return (n + by - 1) / by; }

// The values of a block of which some are not finite, with 0 in place of those.
class Zeroed {
 public:
  const float* operator()(const float* x, int64_t n) {
    for (int64_t i = 0; i < n; ++i) values_[i] = std::isfinite(x[i]) ? x[i] : 0.0f;
    return values_;
  }

 private:
  float values_[kBlock];
};

// What looks at each block of values, for one thread. `add` of a block whose extremes nobody knows says whether all were finite.
struct LooksAtNone {
  bool add(const float* x, int64_t n) const { return row_kernels().all_finite(x, n); }
  void add(const float*, int64_t, const Seen&, bool) const {}
};

// Blocks of values (planes, inner), which are whole planes or parts of one, and the sum of each plane's part.
struct Planes {
  const ChannelLayout& layout;
  int64_t parts = divided_up(layout.inner, kBlock);                  // of a plane
  int64_t together = std::max<int64_t>(1, kBlock / layout.inner);    // planes of a block, where parts is 1
  int64_t pieces = layout.outer * layout.channels * parts;

  int64_t units() const { return divided_up(pieces, together); }
  int64_t unit_size() const { return std::min(kBlock, together * layout.inner); }

  // Pieces of one length that lie one after the other, of neighbouring channels.
  struct Run {
    int64_t piece, count, channel, offset, length;
  };

  // fn(run) for each run of a block.
  template <class Fn>
  void each_run(int64_t unit, const Fn& fn) const {
    int64_t piece = unit * together;
    const int64_t last = std::min(pieces, piece + together);
    while (piece < last) {
      const int64_t begin = piece % parts * kBlock, channel = piece / parts % layout.channels;
      const int64_t count = std::min(last - piece, layout.channels - channel);  // with several parts a block is one piece
      fn(Run{piece, count, channel, piece / parts * layout.inner + begin, std::min(kBlock, layout.inner - begin)});
      piece += count;
    }
  }

  // prepare(run, low, high, totals) goes over a run first, as the kernel `extremes` does.
  template <class Prepare, class Look>
  void pass(const float* x, int64_t begin, int64_t end, const Prepare& prepare, Look& look, double* piece_sums) const {
    Zeroed zeroed;
    for (int64_t unit = begin; unit < end; ++unit) {
      int64_t start = -1, n = 0;
      Seen extremes;
      bool finite = true;
      each_run(unit, [&](const Run& run) {
        if (start < 0) start = run.offset;
        finite &= prepare(run, &extremes.low, &extremes.high, piece_sums ? piece_sums + run.piece : nullptr);
        n += run.count * run.length;
      });
      look.add(x + start, n, extremes, finite);
      if (finite || !piece_sums) continue;
      const float* values = zeroed(x + start, n);
      each_run(unit, [&](const Run& run) {
        for (int64_t i = 0; i < run.count; ++i)
          piece_sums[run.piece + i] = row_kernels().sum(values + (run.offset - start) + i * run.length, run.length);
      });
    }
  }

  void add_up(const std::vector<double>& piece_sums, double* sums) const {
    const double* next = piece_sums.data();
    for (int64_t outer = 0; outer < layout.outer; ++outer)
      for (int64_t channel = 0; channel < layout.channels; ++channel)
        for (int64_t part = 0; part < parts; ++part) sums[channel] += *next++;
  }
};

// Blocks of values (rows, channels), and the sums of the channels over groups of rows.
struct Columns {
  const ChannelLayout& layout;
  int64_t rows = std::max<int64_t>(1, kValuesPerGroup / layout.channels);  // of a group
  int64_t groups = divided_up(layout.outer, rows);

  template <class Look>
  void pass(const float* x, int64_t begin, int64_t end, Look& look, double* group_sums) const {
    Zeroed zeroed;
    const int64_t channels = layout.channels, together = std::max<int64_t>(1, kBlock / channels);
    const auto block = [&](int64_t row, int64_t count, int64_t column, int64_t width, double* sums) {
      const float* values = x + row * channels + column;
      if (!look.add(values, count * width)) values = zeroed(values, count * width);
      if (sums) row_kernels().add_columns(values, count, width, sums + column);
    };
    for (int64_t group = begin; group < end; ++group) {
      double* const sums = group_sums ? group_sums + group * channels : nullptr;
      const int64_t last = std::min(layout.outer, (group + 1) * rows);
      for (int64_t row = group * rows; row < last; row += together)
        for (int64_t column = 0; column < channels; column += kBlock)
          block(row, std::min(together, last - row), column, std::min(kBlock, channels - column), sums);
    }
  }

  void add_up(const std::vector<double>& group_sums, double* sums) const {
    const double* next = group_sums.data();
    for (int64_t group = 0; group < groups; ++group)
      for (int64_t channel = 0; channel < layout.channels; ++channel) sums[channel] += *next++;
  }
};

// Goes over x with a `Look` of each thread's own; adds the channels to sums, which may be null.
template <class Prepare, class ForThread>
void go_over(const float* x, const ChannelLayout& layout, const Prepare& prepare, bool normalizes, const ForThread& for_thread,
             float* sums) {
  if (layout.size() == 0) {
    if (sums) std::fill_n(sums, layout.channels, 0.0f);
    return;
  }
  std::vector<double> parts, totals(sums ? layout.channels : 0, 0.0);
  if (layout.inner == 1 && !normalizes) {
    const Columns columns{layout};
    if (sums) parts.assign(columns.groups * layout.channels, 0.0);
    const int64_t grain = std::max<int64_t>(1, kObservedPerThread / (columns.rows * layout.channels));
    each_range(columns.groups, grain, [&](int64_t begin, int64_t end) {
      for_thread([&](auto& look) { columns.pass(x, begin, end, look, sums ? parts.data() : nullptr); });
    });
    if (sums) columns.add_up(parts, totals.data());
  } else {
    const Planes planes{layout};
    if (sums) parts.assign(planes.pieces, 0.0);
    each_range(planes.units(), std::max<int64_t>(1, kObservedPerThread / planes.unit_size()), [&](int64_t begin, int64_t end) {
      for_thread([&](auto& look) { planes.pass(x, begin, end, prepare, look, sums ? parts.data() : nullptr); });
    });
    if (sums) planes.add_up(parts, totals.data());
  }
  std::transform(totals.begin(), totals.end(), sums, [](double sum) { return static_cast<float>(sum); });
}

template <class Prepare>
Seen count_values(const float* x, const ChannelLayout& layout, const Prepare& prepare, bool normalizes, const HistogramGrid& grid,
                  int64_t* counts, float* sums) {
  struct Counts {
    BinCounter counter;
    Seen seen;
    bool add(const float* x, int64_t n) { return counter.add(x, n, seen); }
    void add(const float* x, int64_t n, const Seen& extremes, bool finite) { counter.add(x, n, extremes, finite, seen); }
  };
  Seen seen;
  std::mutex merging;
  go_over(
      x, layout, prepare, normalizes,
      [&](auto&& pass) {
        Seen mine;
        {
          Counts look{{grid, counts, merging}, {}};
          pass(look);
          mine = look.seen;
        }
        const std::lock_guard lock(merging);
        seen.add(mine);
      },
      sums);
  return seen;
}

auto as_it_is(const float* x) {
  return [x](const Planes::Run& run, float* low, float* high, double* totals) {
    return row_kernels().extremes(x + run.offset, run.count, run.length, low, high, totals);
  };
}

template <class Prepare>
Seen observe(const float* x, const ChannelLayout& layout, const Prepare& prepare, bool normalizes, const HistogramRow& row,
             float* sums) {
  return add_to_row(
      row,
      [&](const HistogramGrid& grid, int64_t* counts) {
        return count_values(x, layout, prepare, normalizes, grid, counts, sums);
      },
      [&](const HistogramGrid& grid, int64_t* counts) { return histogram(x, layout.size(), grid, counts); });
}

}  // namespace

void channel_sums(const float* x, const ChannelLayout& layout, float* sums) {
  LooksAtNone look;
  go_over(x, layout, as_it_is(x), false, [&](auto&& pass) { pass(look); }, sums);
}

Seen observe_activation(const float* x, const ChannelLayout& layout, const HistogramRow& row, float* sums) {
  const ChannelLayout blocks = sums ? layout : ChannelLayout{1, 1, layout.size()};
  return observe(x, blocks, as_it_is(x), false, row, sums);
}

Seen observe_normalized(float* x, const ChannelLayout& layout, const Normalization& by, const HistogramRow& row, float* sums) {
  const auto normalize = [&](const Planes::Run& run, float* low, float* high, double* totals) {
    const Normalizer how{by.scale + run.channel, by.shift + run.channel, by.low, by.high, by.contracted};
    return row_kernels().normalize_planes(x + run.offset, run.count, run.length, how, low, high, totals);
  };
  return observe(x, layout, normalize, true, row, sums);
}

}  // namespace octet
