/* SPDX-License-Identifier: Apache-2.0 */
/* Sealing and opening pages, and the keys for it. */
#define _GNU_SOURCE 1
#include "engine/state/seal.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

#include "seal/seal.h"

#define FOUR 4u /* pages at once, so that their bytes are still in the cache */

/* -------------------------------------------------------------------------------- keys */

int iswi_seal_create(struct isw_engine *e, struct isw_error *error)
{
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	int code;

	if (!(e->config.flags & ISW_ENGINE_SEAL))
		return 0;
	e->seal_ops = iswi_seal_choose(error);
	if (!e->seal_ops)
		return -ENOTSUP;
	code = iswi_seal_key_hold(e->config.seal_key_fd, &e->key_held, error);
	if (!code)
		code = iswi_seal_key_read(e->config.seal_key_fd, key, error);
	if (code)
		return code;
	code = e->seal_ops->make(ISWI_KEYS, &e->sealer);
	if (code)
		iswi_error(error, code, "cannot prepare the sealing of pages with %s: %s",
			   e->seal_ops->name, strerror(-code));
	else
		e->seal_ops->set_key(e->sealer, ISWI_ROOT_KEY, key);
	iswi_seal_forget(key, sizeof(key));
	return code;
}

void iswi_seal_destroy(struct isw_engine *e)
{
	if (e->seal_ops)
		e->seal_ops->destroy(e->sealer);
	iswi_seal_key_let_go(e->key_held);
}

void iswi_seal_derive(struct isw_engine *e, uint32_t number, const unsigned char *salt)
{
	static const unsigned char zeros[ISWI_SEAL_KEY_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES], tag[ISWI_SEAL_TAG_BYTES];
	struct iswi_sealing what = {
		.key = ISWI_ROOT_KEY,
		.in = zeros,
		.out = key,
		.bytes = sizeof(key),
	};

	memcpy(what.nonce, salt, ISWI_SALT_BYTES);
	e->seal_ops->seal(e->sealer, &what, tag);
	e->seal_ops->set_key(e->sealer, number, key);
	iswi_seal_forget(key, sizeof(key));
	iswi_seal_forget(tag, sizeof(tag));
}

int iswi_epoch_begin(struct isw_engine *e, uint32_t places_left)
{
	unsigned char salt[ISWI_SALT_BYTES];
	uint32_t number = ISWI_EPOCHS, places = 0;

	for (uint32_t i = ISWI_EPOCHS; i-- > 0;) {
		if (iswi_kept32(&e->arena->epochs[i].used))
			continue;
		number = i;
		places++;
	}
	if (places <= places_left)
		return -ENOSPC;
	if (getrandom(salt, sizeof(salt), 0) != (ssize_t)sizeof(salt))
		return -EIO;
	memcpy(e->arena->epochs[number].salt, salt, sizeof(salt));
	iswi_keep32(&e->arena->epochs[number].used, 1);
	iswi_seal_derive(e, number, salt);
	/* From here on pages are sealed with it. No nonce is 0, as the seals of unwritten pages
	 * are. */
	iswi_keep64(&e->arena->next_nonce, (uint64_t)number << ISWI_EPOCH_SHIFT | 1);
	return 0;
}

int iswi_seal_begin(struct isw_engine *e, struct isw_error *error)
{
	int code = iswi_sealed(e) ? iswi_epoch_begin(e, 0) : 0;

	return code ? iswi_error(error, code, "cannot get random bytes for the device's keys: %s",
				 strerror(-code))
		    : 0;
}

int iswi_seal_inherit(struct isw_engine *e, struct isw_error *error)
{
	uint64_t next;

	if (!iswi_sealed(e))
		return 0;
	next = iswi_kept64(&e->arena->next_nonce);
	if (iswi_epoch_of(next) >= ISWI_EPOCHS ||
	    !iswi_kept32(&e->arena->epochs[iswi_epoch_of(next)].used))
		return iswi_error(error, -EBADMSG,
				  "the state file is damaged: it does not say with which key pages "
				  "are sealed; nothing was changed");
	for (uint32_t i = 0; i < ISWI_EPOCHS; i++)
		if (iswi_kept32(&e->arena->epochs[i].used))
			iswi_seal_derive(e, i, e->arena->epochs[i].salt);
	return 0;
}

void iswi_epochs_count(const struct isw_engine *e, uint64_t *pages_out)
{
	memset(pages_out, 0, ISWI_EPOCHS * sizeof(*pages_out));
	for (uint64_t page = 0; page < e->pages; page++) {
		uint32_t number = iswi_epoch_of(iswi_kept64(&e->seals[page].number));

		if (iswi_bit(e->backup_current, page) && number < ISWI_EPOCHS)
			pages_out[number]++;
	}
}

int isw_engine_seal_tend(isw_engine *e)
{
	uint64_t next;
	int code;

	if (!iswi_sealed(e))
		return 0;
	next = iswi_kept64(&e->arena->next_nonce);
	if ((next & ISWI_EPOCH_COUNT) < ISWI_EPOCH_PAGES)
		return 0;
	code = iswi_epoch_begin(e, 1); /* the next start needs one before it can make room */
	return code ? code : 1;
}

/* ------------------------------------------------------------------------------- seals */

void iswi_seal_of(const struct isw_engine *e, uint64_t page, struct iswi_seal *seal_out)
{
	const struct iswi_kept_seal *kept;

	if (!iswi_sealed(e)) {
		seal_out->number = iswi_kept32(&e->crc[page]);
		return;
	}
	kept = &e->seals[page];
	seal_out->number = iswi_kept64(&kept->number);
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(seal_out->tag); i++)
		seal_out->tag[i] = iswi_kept64(&kept->tag[i]);
}

void iswi_seal_keep(struct isw_engine *e, uint64_t page, const struct iswi_seal *seal)
{
	struct iswi_kept_seal *kept;

	if (!iswi_sealed(e)) {
		iswi_keep32(&e->crc[page], (uint32_t)seal->number);
		return;
	}
	kept = &e->seals[page];
	iswi_keep64(&kept->number, seal->number);
	for (uint32_t i = 0; i < ISWI_ARRAY_LEN(seal->tag); i++)
		iswi_keep64(&kept->tag[i], seal->tag[i]);
}

uint64_t iswi_seal_number(const struct isw_engine *e, uint64_t page)
{
	return iswi_sealed(e) ? iswi_kept64(&e->seals[page].number) : iswi_kept32(&e->crc[page]);
}

/* The page's number is part of what is sealed: another page's bytes do not open in its place. */
static struct iswi_sealing sealing(const uint64_t *page, uint64_t nonce, const void *from, void *to)
{
	struct iswi_sealing what = {
		.key = iswi_epoch_of(nonce),
		.data = page,
		.data_bytes = sizeof(*page),
		.in = from,
		.out = to,
		.bytes = ISW_PAGE_BYTES,
	};

	memcpy(what.nonce + sizeof(what.nonce) - sizeof(nonce), &nonce, sizeof(nonce));
	return what;
}

static void sum_pages(struct isw_engine *e, uint32_t slot, uint32_t count, const char *from)
{
	while (count) {
		uint32_t crc[FOUR], n = ISWI_MIN(count, FOUR);
		unsigned char *to = e->staging + (uint64_t)slot * ISW_PAGE_BYTES;

		memcpy(to, from, (size_t)n * ISW_PAGE_BYTES);
		iswi_crc32c_pages(to, n, crc);
		for (uint32_t i = 0; i < n; i++)
			e->slots[slot + i].seal.number = crc[i];
		iswi_crash_point();
		slot += n;
		count -= n;
		from += (size_t)n * ISW_PAGE_BYTES;
	}
}

void iswi_seal_pages(struct isw_engine *e, uint64_t page, uint32_t slot, uint32_t count,
		     const char *from)
{
	uint64_t nonce;

	if (!iswi_sealed(e)) {
		sum_pages(e, slot, count, from);
		return;
	}
	nonce = atomic_fetch_add_explicit(&e->arena->next_nonce, count, memory_order_acquire);
	for (uint32_t i = 0; i < count; i++, page++, nonce++) {
		struct iswi_seal *seal = &e->slots[slot + i].seal;
		struct iswi_sealing what =
			sealing(&page, nonce, from + (size_t)i * ISW_PAGE_BYTES,
				e->staging + (uint64_t)(slot + i) * ISW_PAGE_BYTES);

		iswi_nonce_point(e->arena->epochs[what.key].salt, nonce);
		e->seal_ops->seal(e->sealer, &what, (unsigned char *)seal->tag);
		seal->number = nonce;
		iswi_crash_point();
	}
}

bool iswi_seal_open(struct isw_engine *e, uint64_t page, const struct iswi_seal *seal,
		    const void *from, void *to)
{
	struct iswi_sealing what;

	if (!iswi_sealed(e)) {
		bool right = iswi_crc32c(from, ISW_PAGE_BYTES) == seal->number;

		if (to != from)
			memcpy(to, from, ISW_PAGE_BYTES);
		return right;
	}
	what = sealing(&page, seal->number, from, to);
	if (what.key < ISWI_EPOCHS && iswi_kept32(&e->arena->epochs[what.key].used))
		return e->seal_ops->open(e->sealer, &what, (const unsigned char *)seal->tag);
	memset(to, 0, ISW_PAGE_BYTES); /* it is lost, or the state file is damaged */
	return false;
}

static void seals_of(struct isw_engine *e, uint64_t page, uint32_t count,
		     struct iswi_seal *seals_out)
{
	struct iswi_shard *shard = iswi_shard_of(e, page);

	pthread_mutex_lock(&shard->lock);
	for (uint32_t i = 0; i < count; i++)
		iswi_seal_of(e, page + i, &seals_out[i]);
	pthread_mutex_unlock(&shard->lock);
}

/* Summed up without the lock, four at a time. */
static uint32_t compare_sums(struct isw_engine *e, const unsigned char *data, uint64_t page,
			     uint32_t count, struct iswi_seal *seals_out)
{
	uint32_t crc[ISWI_GROUP_PAGES], wrong = 0;

	iswi_crc32c_pages(data, count, crc);
	seals_of(e, page, count, seals_out);
	for (uint32_t i = 0; i < count; i++)
		wrong |= (uint32_t)(seals_out[i].number != crc[i]) << i;
	return wrong;
}

uint32_t iswi_pages_open(struct isw_engine *e, const unsigned char *data, unsigned char *to,
			 uint64_t page, uint32_t count)
{
	struct iswi_seal seals[ISWI_GROUP_PAGES];
	uint32_t wrong = 0;

	if (!iswi_sealed(e)) {
		wrong = compare_sums(e, data, page, count, seals);
		for (uint32_t i = 0; to != data && i < count; i++)
			if (!(wrong >> i & 1))
				memcpy(to + (size_t)i * ISW_PAGE_BYTES,
				       data + (size_t)i * ISW_PAGE_BYTES, ISW_PAGE_BYTES);
		return wrong;
	}
	seals_of(e, page, count, seals);
	for (uint32_t i = 0; i < count; i++, data += ISW_PAGE_BYTES, to += ISW_PAGE_BYTES)
		wrong |= (uint32_t)!iswi_seal_open(e, page + i, &seals[i], data, to) << i;
	return wrong;
}

uint32_t iswi_pages_check(struct isw_engine *e, const unsigned char *data, uint64_t page,
			  uint32_t count, struct iswi_seal *seals_out)
{
	unsigned char opened[ISW_PAGE_BYTES];
	uint32_t wrong = 0;

	if (!iswi_sealed(e))
		return compare_sums(e, data, page, count, seals_out);
	seals_of(e, page, count, seals_out);
	for (uint32_t i = 0; i < count; i++, data += ISW_PAGE_BYTES)
		wrong |= (uint32_t)!iswi_seal_open(e, page + i, &seals_out[i], data, opened) << i;
	iswi_seal_forget(opened, sizeof(opened));
	return wrong;
}
