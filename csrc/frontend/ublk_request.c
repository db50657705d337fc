// SPDX-License-Identifier: Apache-2.0
#include "frontend/ublk_request.h"

#include <errno.h>

#define SECTOR_BYTES 512u

bool iswi_ublk_ended_push(struct iswi_ublk_ended *ended, struct iswi_ublk_tag *tag)
{
	struct iswi_ublk_tag *before = atomic_load_explicit(&ended->last, memory_order_relaxed);

	do
		tag->next = before;
	while (!atomic_compare_exchange_weak_explicit(&ended->last, &before, tag,
						      memory_order_release, memory_order_relaxed));
	return before == NULL;
}

struct iswi_ublk_tag *iswi_ublk_ended_take(struct iswi_ublk_ended *ended)
{
	struct iswi_ublk_tag *tag =
		atomic_exchange_explicit(&ended->last, NULL, memory_order_acquire);
	struct iswi_ublk_tag *oldest = NULL;

	while (tag != NULL) {
		struct iswi_ublk_tag *before = tag->next;

		tag->next = oldest;
		oldest = tag;
		tag = before;
	}
	return oldest;
}

int iswi_ublk_parse(const struct ublksrv_io_desc *desc, struct iswi_ublk_tag *tag)
{
	struct iswi_req *req = &tag->req;

	req->offset = desc->start_sector * SECTOR_BYTES;
	req->length = (uint64_t)desc->nr_sectors * SECTOR_BYTES;
	/* The kernel's numbers of flags count from the start of the word, its op included. */
	req->flags = (desc->op_flags & UBLK_IO_F_FUA) != 0 ? ISWI_REQ_FUA : 0;
	switch (ublksrv_get_op(desc)) {
	case UBLK_IO_OP_READ:
		req->op = ISWI_READ;
		return 0;
	case UBLK_IO_OP_WRITE:
		req->op = ISWI_WRITE;
		return 0;
	case UBLK_IO_OP_DISCARD:
		req->op = ISWI_TRIM;
		return 0;
	case UBLK_IO_OP_WRITE_ZEROES:
		req->op = ISWI_ZERO;
		return 0;
	case UBLK_IO_OP_FLUSH:
		req->op = ISWI_FLUSH;
		req->offset = 0; /* a flush has no range, whatever stands there */
		req->length = 0;
		return 0;
	default:
		return -EOPNOTSUPP;
	}
}

int32_t iswi_ublk_result(const struct iswi_req *req, int error)
{
	if (error != 0)
		return error;
	/* Bytes only where data moves; requests of those are at most 32 MiB. */
	return req->op == ISWI_READ || req->op == ISWI_WRITE ? (int32_t)req->length : 0;
}
