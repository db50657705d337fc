/* SPDX-License-Identifier: Apache-2.0 */
/* What is submitted, in order, and how it gets to the device. See rdma_internal.h first. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "transport/rdma_internal.h"

int iswi_rdma_places_make(uint32_t slots, struct iswi_rdma_places **places_out)
{
	struct iswi_rdma_places *places =
		calloc(1, sizeof(*places) + slots * sizeof(struct rdma_place));

	if (places == NULL)
		return -ENOMEM;
	places->count = slots;
	atomic_init(&places->users, 1);
	*places_out = places;
	return 0;
}

void iswi_rdma_places_hold(struct iswi_rdma_places *places)
{
	atomic_fetch_add(&places->users, 1);
}

void iswi_rdma_places_leave(struct iswi_rdma_places *places)
{
	if (places != NULL && atomic_fetch_sub(&places->users, 1) == 1)
		free(places);
}

int iswi_rdma_places_set(struct iswi_rdma_places *places, uint32_t slot,
			 const struct isw_rdma_key *key)
{
	if (slot >= places->count)
		return -EINVAL;
	atomic_store_explicit(&places->place[slot].address, key->address, memory_order_relaxed);
	/* Pair: the load in locate. */
	atomic_store_explicit(&places->place[slot].key, key->rkey | RDMA_KEY_THERE,
			      memory_order_release);
	return 0;
}

bool iswi_rdma_locate(const struct iswi_rdma *rdma, const struct iswi_xfer *xfer,
		      uint64_t *address_out, uint32_t *key_out)
{
	uint64_t slot = xfer->offset / rdma->slab_bytes, within = xfer->offset % rdma->slab_bytes;
	const struct rdma_place *place;
	uint64_t key;

	if (slot >= rdma->places->count)
		return false;
	place = &rdma->places->place[slot];
	key = atomic_load_explicit(&place->key, memory_order_acquire);
	if (key == 0)
		return false;
	*address_out = atomic_load_explicit(&place->address, memory_order_relaxed) + within;
	*key_out = (uint32_t)key;
	return true;
}

struct rdma_slot *iswi_rdma_slot(struct iswi_rdma *rdma, uint64_t number)
{
	return &rdma->slot[number % rdma->depth];
}

/* Contiguous bytes of the bounce ring. NULL: not before something is done. */
static char *bounce_take(struct iswi_rdma *rdma, uint32_t bytes)
{
	uint64_t at, left;

	/* An empty ring starts again at 0, so that even its whole length is contiguous. */
	if (rdma->bounce_head == rdma->bounce_tail)
		rdma->bounce_head = rdma->bounce_tail = 0;
	at = rdma->bounce_tail % rdma->bounce_bytes;
	left = rdma->bounce_bytes - at;
	if (left < bytes) {
		if (rdma->bounce_tail + left + bytes - rdma->bounce_head > rdma->bounce_bytes)
			return NULL;
		rdma->bounce_tail += left; /* given back with the next transfer */
		at = 0;
	} else if (rdma->bounce_tail + bytes - rdma->bounce_head > rdma->bounce_bytes) {
		return NULL;
	}
	rdma->bounce_tail += bytes;
	return rdma->bounce + at;
}

static bool is_staged(const struct iswi_rdma *rdma, const struct iswi_xfer *xfer)
{
	const struct iswi_rdma_domain *domain = rdma->domain;
	uintptr_t at = (uintptr_t)xfer->buf, base = (uintptr_t)domain->memory;

	return domain->mr != NULL && at >= base && xfer->length <= domain->bytes &&
	       at - base <= domain->bytes - xfer->length;
}

/* The first pending transfer into the ring and *post. False: there is none, or no room. */
static bool prepare(struct iswi_rdma *rdma, struct iswi_verbs_post *post)
{
	struct iswi_xfer *xfer = rdma->tq.pending_first;
	struct rdma_slot *slot;
	char *bounce = NULL;
	bool staged;

	if (xfer == NULL || rdma->tail - rdma->head == rdma->depth)
		return false;
	staged = xfer->kind == ISWI_XFER_WRITE && is_staged(rdma, xfer);
	if (!staged && (bounce = bounce_take(rdma, xfer->length)) == NULL)
		return false;
	rdma->tq.pending_first = xfer->next;
	slot = iswi_rdma_slot(rdma, rdma->tail);
	*slot = (struct rdma_slot){.xfer = xfer, .bounce = bounce, .bounce_end = rdma->bounce_tail};
	if (bounce != NULL && xfer->kind == ISWI_XFER_WRITE)
		memcpy(bounce, xfer->buf, xfer->length);
	*post = (struct iswi_verbs_post){
		.id = rdma->tail,
		.write = xfer->kind == ISWI_XFER_WRITE,
		.signalled = rdma->tail % RDMA_SIGNAL_EVERY == RDMA_SIGNAL_EVERY - 1,
		.length = xfer->length,
		.local = staged ? xfer->buf : bounce,
		.lkey = staged ? rdma->domain->lkey : rdma->bounce_lkey,
	};
	/* The slot had a key at submit, and keys are never removed. */
	if (!iswi_rdma_locate(rdma, xfer, &post->remote, &post->rkey))
		post->rkey = 0;
	rdma->tail++;
	return true;
}

void iswi_rdma_post_pending(struct iswi_rdma *rdma)
{
	struct iswi_verbs_post posts[RDMA_BATCH];
	uint32_t count;
	int code;

	while (rdma->tq.state == ISWI_TQ_UP) {
		count = 0;
		while (count < RDMA_BATCH && prepare(rdma, &posts[count]))
			count++;
		if (count == 0)
			return;
		posts[count - 1].signalled = true;
		code = rdma->verbs->post(rdma->qp, posts, &count);
		rdma->posted += count;
		if (code != 0) {
			iswi_tq_fail(&rdma->tq, code);
			iswi_tq_wake(&rdma->tq);
		}
	}
}

struct iswi_xfer *iswi_rdma_take_all(struct iswi_rdma *rdma)
{
	struct iswi_xfer *first = NULL, **link = &first;

	for (; rdma->head < rdma->tail; rdma->head++) {
		*link = iswi_rdma_slot(rdma, rdma->head)->xfer;
		link = &(*link)->next;
	}
	*link = rdma->tq.pending_first;
	rdma->tq.pending_first = NULL;
	return first;
}
