/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What tells a page's right bytes from others: its seal.
 *
 * A device that seals (ISW_ENGINE_SEAL) encrypts each version of a page with AES-256-GCM. The
 * seal is the nonce and the tag; the bytes in staging buffers, on donors and on the backup are what
 * the cipher made of the page. Of a device that does not seal, the seal is a CRC-32C, and the bytes
 * are the page.
 *
 * Nonces. A key is used for one epoch. It comes from the device's key and the epoch's salt, 96
 * random bits: it is the first 32 bytes of the key stream that GCM has for the device's key with
 * that salt as nonce, so that making it takes no memory. A page's nonce is the epoch's number and a
 * count. Salts and count are in the arena, and a count is taken there before it is used (R17), so
 * neither a kill nor a take-over repeats one. A start begins an epoch, so tables that somebody puts
 * back repeat none either.
 */
#ifndef ISWI_STATE_SEAL_H
#define ISWI_STATE_SEAL_H

#include "engine/state/arena.h"
#include "engine/state/engine.h"
#include "engine/state/page.h"

/* Numbers of the sealer's keys after those of the epochs: the device's, and that of its tables. */
#define ISWI_ROOT_KEY   (ISWI_EPOCHS + 0u)
#define ISWI_TABLES_KEY (ISWI_EPOCHS + 1u)
#define ISWI_KEYS       (ISWI_EPOCHS + 2u)
/* Of a page that was lost when its key gave its place up: it is of no key, and never opens. */
#define ISWI_LOST_NUMBER UINT64_MAX
/* Pages that one key seals, about: after them isw_engine_seal_tend begins an epoch. */
#define ISWI_EPOCH_PAGES (1ull << 32)
/* The number of the page's key. */
static inline uint32_t iswi_epoch_of(uint64_t nonce)
{
	return (uint32_t)(nonce >> ISWI_EPOCH_SHIFT);
}
static inline bool iswi_sealed(const struct isw_engine *e)
{
	return e->sealer;
}
static inline size_t iswi_seal_bytes(const struct isw_engine *e)
{
	return iswi_sealed(e) ? sizeof(struct iswi_kept_seal) : sizeof(uint32_t);
}

/* The library and the device's key. -ENOTSUP, -EBADF; call destroy after an error, too. */
int iswi_seal_create(struct isw_engine *e, struct isw_error *error);
void iswi_seal_destroy(struct isw_engine *e);
/* The first epoch of a new arena. */
int iswi_seal_begin(struct isw_engine *e, struct isw_error *error);
/* Of another process's arena, by its successor: its epochs' keys. */
int iswi_seal_inherit(struct isw_engine *e, struct isw_error *error);
/* A new epoch, at a number that is not in use; so many others are to be left. -ENOSPC. */
int iswi_epoch_begin(struct isw_engine *e, uint32_t places_left);
/* How many of the backup's pages each epoch's key has sealed. Control thread, while no I/O runs. */
void iswi_epochs_count(const struct isw_engine *e, uint64_t *pages_out);
/* The key that comes from the device's key and a salt, at that number of the sealer. */
void iswi_seal_derive(struct isw_engine *e, uint32_t number, const unsigned char *salt);

/* Under the page's shard lock: the seal of its newest version. */
void iswi_seal_of(const struct isw_engine *e, uint64_t page, struct iswi_seal *seal_out);
/* Under the page's shard lock, while a descriptor stands for it (R9). */
void iswi_seal_keep(struct isw_engine *e, uint64_t page, const struct iswi_seal *seal);
/* Two versions have different ones; under the page's shard lock. */
uint64_t iswi_seal_number(const struct isw_engine *e, uint64_t page);

/* Consecutive pages' bytes go to consecutive staging buffers, with their seals. No lock. */
void iswi_seal_pages(struct isw_engine *e, uint64_t page, uint32_t slot, uint32_t count,
		     const char *from);
/*
 * A page out of its sealed bytes, which may be in the same memory. False: they are not that
 * version's; then of a device that seals `to` is zeros. No lock.
 */
bool iswi_seal_open(struct isw_engine *e, uint64_t page, const struct iswi_seal *seal,
		    const void *from, void *to);
/*
 * Consecutive pages of one group, no lock held, out of `data` to `to`, which may be the same.
 * Returns a bit for each whose bytes are not those of its newest version.
 */
uint32_t iswi_pages_open(struct isw_engine *e, const unsigned char *data, unsigned char *to,
			 uint64_t page, uint32_t count);
/* The same, but data stays sealed; seals_out: with what each page was compared. */
uint32_t iswi_pages_check(struct isw_engine *e, const unsigned char *data, uint64_t page,
			  uint32_t count, struct iswi_seal *seals_out);

#endif
