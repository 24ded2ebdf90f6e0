// by_rows(d) calls dot_rows<T>(d) for T = d.rows, up to kBlock. Included inside an ISA file's own namespace.
template <int T = kBlock>
inline void by_rows(const Dot& d) {
  if (d.rows == T) return dot_rows<T>(d);
  if constexpr (T > 1) by_rows<T - 1>(d);
}
