// SPDX-License-Identifier: Apache-2.0
/* What is true of every request, whatever lies behind the export. */
#include "wire/nbd_conn.h"

int iswi_nbd_check(const struct iswi_nbd_export *export, const struct nbd_request *request)
{
	const bool writes =
		request->command == NBD_CMD_WRITE || request->command == NBD_CMD_WRITE_ZEROES;
	uint16_t flags = NBD_CMD_FLAG_FUA;

	if (request->command == NBD_CMD_WRITE_ZEROES)
		flags |= NBD_CMD_FLAG_NO_HOLE;
	if ((request->flags & ~flags) != 0)
		return -EINVAL;
	switch (request->command) {
	case NBD_CMD_FLUSH:
		return 0;
	case NBD_CMD_READ:
	case NBD_CMD_WRITE:
		if (request->length > export->block_bytes_max)
			return -EINVAL;
		break;
	case NBD_CMD_TRIM:
	case NBD_CMD_WRITE_ZEROES:
		break;
	default:
		return -EINVAL;
	}
	if (request->length == 0)
		return -EINVAL;
	if (((request->offset | request->length) & (export->block_bytes_min - 1)) != 0)
		return -EINVAL;
	/* In this order nothing can wrap. */
	if (request->offset > export->size_bytes ||
	    request->length > export->size_bytes - request->offset)
		return writes ? -ENOSPC : -EINVAL;
	return 0;
}

int iswi_nbd_next(struct iswi_nbd_conn *conn, struct nbd_request *request)
{
	int err;

	if (atomic_load(&conn->closing))
		return -ESHUTDOWN;
	err = nbd_get_request(conn->rx + conn->rx_head, request);
	if (err != 0)
		return err;
	conn->rx_head += NBD_REQUEST_BYTES;
	if (request->command == NBD_CMD_DISC)
		return -ENODATA;
	/* Too much to skip: it could as well be a stream out of step. */
	if (request->command == NBD_CMD_WRITE && request->length > ISWI_NBD_PAYLOAD_BYTES_MAX)
		return -EPROTO;
	return 0;
}
