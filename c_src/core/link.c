/* Sums and links, which backends make: what is asked of them is checked here. */
#include "backend.h"
#include "error.h"

static fa_status unsupported(fa_device device, const char *expected, fa_error *error) {
  return fa_fail(error, FA_STATUS_UNSUPPORTED, "device", expected, fa_device_kind_name(device.kind));
}

fa_status fa_sum_parts(const fa_sum *sum, fa_device device, void *stream, fa_error *error) {
  const fa_backend *backend;
  fa_status status = fa_backend_find(device, &backend, error);
  if (!status && (unsigned)sum->dtype >= FA_NUM_FLOATS)
    status = fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "part", "type f32, f64, bf16 or f16",
                     fa_dtype_name(sum->dtype));
  if (!status && (sum->num_parts < 0 || sum->num_parts > FA_MAX_SUMMANDS))
    status = fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "parts", FA_TEXT("0 to %d", FA_MAX_SUMMANDS),
                     FA_TEXT("%d", sum->num_parts));
  if (!status && !backend->sum) status = unsupported(device, "one that sums", error);
  if (!status && sum->count > 0) status = backend->sum(sum, device.index, stream, error);
  return status ? status : fa_succeed(error);
}

static fa_status find_links(fa_device device, const fa_link_ops **ops, fa_error *error) {
  const fa_backend *backend;
  fa_status status = fa_backend_find(device, &backend, error);
  if (status) return status;
  *ops = backend->link;
  return *ops ? FA_STATUS_OK : unsupported(device, "one that links connect", error);
}

fa_status fa_link_make_id(fa_device device, unsigned char id[FA_LINK_ID_BYTES], fa_error *error) {
  const fa_link_ops *ops;
  fa_status status = find_links(device, &ops, error);
  if (!status) status = ops->make_id(id, error);
  return status ? status : fa_succeed(error);
}

fa_status fa_link_new(fa_device device, const unsigned char id[FA_LINK_ID_BYTES], int32_t num_ranks,
                      int32_t rank, int64_t timeout_ms, fa_link **link, fa_error *error) {
  const fa_link_ops *ops;
  *link = NULL;
  fa_status status = find_links(device, &ops, error);
  if (!status && (num_ranks < 1 || rank < 0 || rank >= num_ranks))
    status = fa_fail(error, FA_STATUS_INVALID_ARGUMENT, "rank", FA_TEXT("one of %d", num_ranks),
                     FA_TEXT("%d", rank));
  if (!status) status = ops->new_link(device.index, id, num_ranks, rank, timeout_ms, link, error);
  return status ? status : fa_succeed(error);
}

fa_status fa_link_begin(fa_link *link, const fa_transfer *transfers, int32_t num_transfers,
                        fa_exchange **exchange, fa_error *error) {
  const fa_status status = link->ops->begin(link, transfers, num_transfers, exchange, error);
  return status ? status : fa_succeed(error);
}

fa_status fa_link_await(fa_link *link, fa_exchange *exchange, fa_error *error) {
  const fa_status status = link->ops->await(link, exchange, error);
  return status ? status : fa_succeed(error);
}

void fa_link_abort(fa_link *link) { link->ops->abort(link); }

void fa_link_free(fa_link *link) { link->ops->free(link); }
