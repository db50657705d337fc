// SPDX-License-Identifier: Apache-2.0
/*
 * The receiving half: replies out of a stream of bytes. No I/O here, so that a fuzzer can feed it.
 *
 * Headers pass through a small buffer; of a READ's payload only the part that came along with its
 * header is copied, the rest is received straight into the transfer's buffer, together with the
 * headers that follow it. A payload without a buffer passes through the small one, and is dropped.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <string.h>

#include "transport/tcp_internal.h"

uint32_t iswi_tcp_rx_space(struct iswi_tcp *tcp, struct iovec *iov_out)
{
	struct tcp_receiver *rx = &tcp->rx;
	uint32_t count = 0;

	if (rx->xfer != NULL && rx->xfer->buf != NULL) {
		iov_out[count].iov_base = (char *)rx->xfer->buf + rx->filled;
		iov_out[count].iov_len = rx->xfer->length - rx->filled;
		count++;
	}
	/* At most part of a header is left over. */
	memmove(rx->bytes, rx->bytes + rx->start, rx->end - rx->start);
	rx->end -= rx->start;
	rx->start = 0;
	iov_out[count].iov_base = rx->bytes + rx->end;
	iov_out[count].iov_len = sizeof(rx->bytes) - rx->end;
	return count + 1;
}

static void payload_complete(struct iswi_tcp *tcp)
{
	struct iswi_xfer *xfer = tcp->rx.xfer;

	pthread_mutex_lock(&tcp->tq.lock);
	iswi_tcp_slot_free(tcp, tcp->rx.slot);
	pthread_mutex_unlock(&tcp->tq.lock);
	tcp->rx.xfer = NULL;
	xfer->done(xfer, 0);
}

/* n bytes of payload have arrived. */
static void payload_advance(struct iswi_tcp *tcp, size_t n)
{
	tcp->rx.filled += (uint32_t)n;
	if (tcp->rx.filled == tcp->rx.xfer->length)
		payload_complete(tcp);
}

/* Of the bytes received, those that are payload. */
static void payload_take(struct iswi_tcp *tcp)
{
	struct tcp_receiver *rx = &tcp->rx;
	size_t n = ISWI_MIN(rx->end - rx->start, rx->xfer->length - rx->filled);

	if (rx->xfer->buf != NULL)
		memcpy((char *)rx->xfer->buf + rx->filled, rx->bytes + rx->start, n);
	rx->start += (uint32_t)n;
	payload_advance(tcp, n);
}

static int reply_error(uint32_t error)
{
	int err = nbd_error_to_errno(error);

	/* To a submitter -ESHUTDOWN means that this queue is down, which it is not. */
	return err == -ESHUTDOWN ? -EIO : err;
}

/*
 * Takes the transfer that a reply names. *done_out: the transfer to end now, or NULL when its
 * payload follows or its last byte is not known to be sent. -EPROTO: no such request.
 */
static int reply_match(struct iswi_tcp *tcp, const struct nbd_simple_reply *reply,
		       struct iswi_xfer **done_out)
{
	uint32_t index = reply->cookie & ((1u << TCP_SLOT_BITS) - 1);
	struct tcp_slot *slot;
	int err = 0;

	*done_out = NULL;
	pthread_mutex_lock(&tcp->tq.lock);
	slot = index < tcp->depth ? &tcp->slot[index] : NULL;
	if (slot == NULL || slot->xfer == NULL || slot->replied ||
	    slot->generation != reply->cookie >> TCP_SLOT_BITS) {
		err = -EPROTO;
	} else if (!slot->sent) {
		/* The sender may still be reading the buffer: it ends the write afterwards. */
		slot->replied = true;
		slot->error = reply_error(reply->error);
	} else if (slot->xfer->kind == ISWI_XFER_READ && reply->error == 0) {
		/* Stays in its slot, so that its deadline is kept. */
		tcp->rx.xfer = slot->xfer;
		tcp->rx.slot = index;
		tcp->rx.filled = 0;
	} else {
		*done_out = slot->xfer;
		iswi_tcp_slot_free(tcp, index);
	}
	pthread_mutex_unlock(&tcp->tq.lock);
	return err;
}

static int reply_take(struct iswi_tcp *tcp)
{
	struct tcp_receiver *rx = &tcp->rx;
	struct nbd_simple_reply reply;
	struct iswi_xfer *done;
	int err;

	err = nbd_get_simple_reply(rx->bytes + rx->start, &reply);
	if (err == 0)
		err = reply_match(tcp, &reply, &done);
	if (err < 0)
		return err;
	rx->start += NBD_SIMPLE_REPLY_BYTES;
	if (done != NULL)
		done->done(done, reply_error(reply.error));
	if (rx->xfer != NULL)
		payload_take(tcp);
	return 0;
}

int iswi_tcp_rx_advance(struct iswi_tcp *tcp, size_t n)
{
	struct tcp_receiver *rx = &tcp->rx;

	if (rx->xfer != NULL && rx->xfer->buf != NULL) {
		size_t direct = ISWI_MIN(n, (size_t)(rx->xfer->length - rx->filled));

		n -= direct;
		payload_advance(tcp, direct);
	}
	rx->end += (uint32_t)n;
	if (rx->xfer != NULL)
		payload_take(tcp);
	while (rx->xfer == NULL && rx->end - rx->start >= NBD_SIMPLE_REPLY_BYTES) {
		int err = reply_take(tcp);

		if (err < 0)
			return err;
	}
	return 0;
}
