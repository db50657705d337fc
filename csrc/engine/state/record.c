/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Remotes' records: opaque, of Python's making, so that a successor knows whose lease a remote is.
 * The older of the two copies is written over, and its number, stored last, makes it the newer one.
 */
#include <string.h>

#include "engine/state/arena.h"
#include "engine/state/engine.h"

static uint32_t copy_crc(const struct iswi_record_copy *c, uint32_t sequence)
{
	uint32_t words[3] = {sequence, c->length, iswi_crc32c(c->data, c->length)};

	return iswi_crc32c(words, sizeof(words));
}

static bool is_whole(const struct iswi_record_copy *c)
{
	uint32_t sequence = atomic_load_explicit(&c->sequence, memory_order_acquire);

	return sequence && c->length <= ISW_RECORD_BYTES_MAX && c->crc == copy_crc(c, sequence);
}

/* The copy that counts; NULL when none does. */
static struct iswi_record_copy *newest(struct iswi_record *record)
{
	struct iswi_record_copy *a = &record->copies[0], *b = &record->copies[1];

	if (!is_whole(a))
		return is_whole(b) ? b : NULL;
	if (!is_whole(b))
		return a;
	return iswi_is_newer(iswi_kept32(&b->sequence), iswi_kept32(&a->sequence)) ? b : a;
}

uint32_t iswi_record_read(const struct isw_engine *e, uint32_t remote, void *data_out)
{
	const struct iswi_record_copy *c = newest(&e->records[remote]);

	if (!c)
		return 0;
	if (data_out)
		memcpy(data_out, c->data, c->length);
	return c->length;
}

void iswi_record_write(struct isw_engine *e, uint32_t remote, const void *data, uint32_t length)
{
	struct iswi_record *record = &e->records[remote];
	const struct iswi_record_copy *old = newest(record);
	struct iswi_record_copy *c = &record->copies[old == &record->copies[0]];
	uint32_t sequence = iswi_version_after(old ? iswi_kept32(&old->sequence) : 0);

	if (!length && (!old || !old->length))
		return;
	iswi_keep32(&c->sequence, 0);
	/* Not above: a process killed from here on leaves the old record. */
	atomic_thread_fence(memory_order_seq_cst);
	if (length)
		memcpy(c->data, data, length);
	iswi_crash_point();
	c->length = length;
	c->crc = copy_crc(c, sequence);
	iswi_keep32(&c->sequence, sequence);
}
