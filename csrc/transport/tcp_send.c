// SPDX-License-Identifier: Apache-2.0
/* The sending half, and the slots: many requests, one system call, no waiting. */
#define _GNU_SOURCE 1
#include <errno.h>
#include <sys/socket.h>

#include "transport/tcp_internal.h"

void iswi_tcp_slot_free(struct iswi_tcp *tcp, uint32_t index)
{
	tcp->slot[index].xfer = NULL;
	tcp->slot[index].next_free = tcp->free_slot;
	tcp->free_slot = index;
	tcp->in_flight--;
}

bool iswi_tcp_claim_sender(struct iswi_tcp *tcp)
{
	if (tcp->tq.state != ISWI_TQ_UP || tcp->sending || tcp->tq.pending_first == NULL ||
	    tcp->free_slot == TCP_SLOT_NONE)
		return false;
	tcp->sending = true;
	return true;
}

static uint64_t slot_take(struct iswi_tcp *tcp, struct iswi_xfer *xfer, uint32_t *index_out)
{
	uint32_t index = tcp->free_slot;
	struct tcp_slot *slot = &tcp->slot[index];

	tcp->free_slot = slot->next_free;
	tcp->in_flight++;
	slot->xfer = xfer;
	slot->generation++;
	slot->error = 0;
	slot->replied = false;
	/* For a READ the sender needs only the header, which is copied into the batch. */
	slot->sent = xfer->kind == ISWI_XFER_READ;
	*index_out = index;
	return slot->generation << TCP_SLOT_BITS | index;
}

bool iswi_tcp_batch_build(struct iswi_tcp *tcp)
{
	struct tcp_batch *batch = &tcp->batch;
	uint32_t count = 0;
	uint64_t end = 0;

	batch->iov_first = 0;
	batch->iov_count = 0;
	batch->write_first = 0;
	batch->write_count = 0;
	batch->sent_bytes = 0;
	while (count < TCP_BATCH && tcp->tq.pending_first != NULL &&
	       tcp->free_slot != TCP_SLOT_NONE) {
		struct iswi_xfer *xfer = tcp->tq.pending_first;
		struct nbd_request request = {.offset = xfer->offset, .length = xfer->length};
		uint32_t index;

		tcp->tq.pending_first = xfer->next;
		request.cookie = slot_take(tcp, xfer, &index);
		request.command = xfer->kind == ISWI_XFER_READ ? NBD_CMD_READ : NBD_CMD_WRITE;
		nbd_put_request(batch->header[count], &request);
		batch->iov[batch->iov_count++] =
			(struct iovec){batch->header[count], NBD_REQUEST_BYTES};
		end += NBD_REQUEST_BYTES;
		if (xfer->kind == ISWI_XFER_WRITE) {
			batch->iov[batch->iov_count++] = (struct iovec){xfer->buf, xfer->length};
			end += xfer->length;
			batch->write[batch->write_count].end = end;
			batch->write[batch->write_count].slot = index;
			batch->write_count++;
		}
		count++;
	}
	return count > 0;
}

uint32_t iswi_tcp_batch_advance(struct iswi_tcp *tcp, uint64_t n, struct tcp_ended *ended_out)
{
	struct tcp_batch *batch = &tcp->batch;
	uint32_t ended = 0;

	batch->sent_bytes += n;
	while (batch->write_first < batch->write_count &&
	       batch->write[batch->write_first].end <= batch->sent_bytes) {
		uint32_t index = batch->write[batch->write_first++].slot;
		struct tcp_slot *slot = &tcp->slot[index];

		slot->sent = true;
		if (!slot->replied)
			continue;
		ended_out[ended++] = (struct tcp_ended){slot->xfer, slot->error};
		iswi_tcp_slot_free(tcp, index);
	}
	while (n > 0) {
		struct iovec *iov = &batch->iov[batch->iov_first];

		if (n < iov->iov_len) {
			iov->iov_base = (char *)iov->iov_base + n;
			iov->iov_len -= n;
			break;
		}
		n -= iov->iov_len;
		batch->iov_first++;
	}
	return ended;
}

/* Lock held on entry and return. False: stop sending. */
static bool send_once(struct iswi_tcp *tcp)
{
	struct tcp_batch *batch = &tcp->batch;
	struct msghdr message = {
		.msg_iov = batch->iov + batch->iov_first,
		.msg_iovlen = batch->iov_count - batch->iov_first,
	};
	struct tcp_ended ended[TCP_BATCH];
	uint32_t count;
	ssize_t n;
	int err;

	pthread_mutex_unlock(&tcp->tq.lock);
	n = sendmsg(tcp->fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
	err = errno;
	pthread_mutex_lock(&tcp->tq.lock);
	if (n < 0) {
		if (err == EINTR)
			return true;
		if (err == EAGAIN || err == EWOULDBLOCK)
			tcp->blocked = true;
		else
			iswi_tq_fail(&tcp->tq, -err);
		return false;
	}
	count = iswi_tcp_batch_advance(tcp, (uint64_t)n, ended);
	if (count == 0)
		return true;
	pthread_mutex_unlock(&tcp->tq.lock);
	for (uint32_t i = 0; i < count; i++)
		ended[i].xfer->done(ended[i].xfer, ended[i].error);
	pthread_mutex_lock(&tcp->tq.lock);
	return true;
}

void iswi_tcp_send(struct iswi_tcp *tcp, bool on_receiver)
{
	uint32_t rounds = 0;
	bool wake;

	pthread_mutex_lock(&tcp->tq.lock);
	while (tcp->tq.state == ISWI_TQ_UP &&
	       (tcp->batch.iov_first < tcp->batch.iov_count || iswi_tcp_batch_build(tcp))) {
		/* A submitter must not remain everybody's sender. */
		if (!on_receiver && rounds++ == TCP_SEND_ROUNDS) {
			tcp->blocked = true;
			break;
		}
		if (!send_once(tcp))
			break;
	}
	if (!tcp->blocked)
		tcp->sending = false;
	wake = !on_receiver && (tcp->blocked || tcp->tq.state != ISWI_TQ_UP);
	if (tcp->tq.state != ISWI_TQ_UP)
		pthread_cond_broadcast(&tcp->tq.quiet);
	pthread_mutex_unlock(&tcp->tq.lock);
	if (wake)
		iswi_tq_wake(&tcp->tq);
}
