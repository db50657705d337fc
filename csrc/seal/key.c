// SPDX-License-Identifier: Apache-2.0
/*
 * A device's key: a page of memory that is known by a descriptor.
 *
 * It is memfd_secret(2) memory where the kernel has that: the kernel itself does not map it, never
 * swaps it, and leaves it out of core dumps. (While such memory exists the host does not hibernate,
 * which would write it to disk.) Elsewhere it is a memfd: tmpfs memory, which the kernel may swap
 * while no process has it locked. An engine therefore holds it locked for as long as it lives.
 *
 * A key on disk is sealed with a host's key: nonce, sealed key, tag.
 */
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "seal/seal.h"
#include "util/util.h"

/* Linux 6.3; a kernel or a C library before that does not know it. */
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

#define MAGIC_BYTES 16u
#define NO_GROWING  (F_SEAL_SEAL | F_SEAL_SHRINK | F_SEAL_GROW)

static const char magic[MAGIC_BYTES] = "infiniswap key1";
/* Associated data: a sealed key is taken for nothing else that a host key may seal one day. */
static const char label[] = "infiniswap device key 1";

struct key_page {
	char magic[MAGIC_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES];
};

struct sealed_key {
	unsigned char nonce[ISWI_SEAL_NONCE_BYTES];
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	unsigned char tag[ISWI_SEAL_TAG_BYTES];
};
_Static_assert(sizeof(struct sealed_key) == ISW_SEALED_KEY_BYTES, "as isw.h says");
_Static_assert(ISWI_SEAL_KEY_BYTES == ISW_SEAL_KEY_BYTES, "as isw.h says");

/* ------------------------------------------------------------------------- memory */

static int make_memfd(void)
{
	int fd = memfd_create("infiniswap-key", MFD_CLOEXEC | MFD_NOEXEC_SEAL);

	if (fd < 0 && errno == EINVAL)
		fd = memfd_create("infiniswap-key", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	return fd;
}

/* ISW_PAGE_BYTES of memory. */
static int make_memory(struct isw_error *error)
{
	bool secret = true;
	int fd = -1, code;

#ifdef SYS_memfd_secret
	fd = (int)syscall(SYS_memfd_secret, O_CLOEXEC);
#endif
	if (fd < 0) {
		secret = false;
		fd = make_memfd();
	}
	if (fd < 0)
		return iswi_error(error, -errno, "no memory can be made for a key: %s",
				  strerror(errno));
	/* Nobody may shrink it under a reader; secret memory cannot change its size at all. */
	if (ftruncate(fd, ISW_PAGE_BYTES) != 0 ||
	    (!secret && fcntl(fd, F_ADD_SEALS, NO_GROWING) != 0)) {
		code = iswi_error(error, -errno, "no memory can be made for a key: %s",
				  strerror(errno));
		close(fd);
		return code;
	}
	return fd;
}

/* Locked; of secret memory that is a matter of course. */
static int map_page(int fd, struct key_page **page_out)
{
	void *memory = mmap(NULL, ISW_PAGE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (memory == MAP_FAILED)
		return -errno;
	(void)madvise(memory, ISW_PAGE_BYTES, MADV_DONTDUMP);
	(void)madvise(memory, ISW_PAGE_BYTES, MADV_DONTFORK);
	(void)mlock(memory, ISW_PAGE_BYTES);
	*page_out = memory;
	return 0;
}

static int map_new(int fd, struct key_page **page_out, struct isw_error *error)
{
	int code = map_page(fd, page_out);

	if (code != 0)
		return iswi_error(error, code,
				  "the memory of a key cannot be mapped: %s; the limit of locked "
				  "memory must allow one more page (ulimit -l)",
				  strerror(-code));
	return 0;
}

/* Of a descriptor that somebody else gives. */
static int map_key(int fd, struct key_page **page_out, struct isw_error *error)
{
	struct key_page *page;
	struct stat status;

	if (fstat(fd, &status) != 0 || !S_ISREG(status.st_mode) ||
	    status.st_size != ISW_PAGE_BYTES || map_page(fd, &page) != 0)
		return iswi_error(error, -EBADF, "descriptor %d is no key of a device", fd);
	if (memcmp(page->magic, magic, sizeof(magic)) != 0) {
		munmap(page, ISW_PAGE_BYTES);
		return iswi_error(error, -EBADF,
				  "descriptor %d is no key of a device, or one that was forgotten",
				  fd);
	}
	*page_out = page;
	return 0;
}

/* Of at most 256 bytes, which getrandom gives at once or not at all. */
static int make_random(void *out, size_t bytes, struct isw_error *error)
{
	if (getrandom(out, bytes, 0) != (ssize_t)bytes)
		return iswi_error(error, -EIO, "the kernel gives no random numbers (getrandom): %s",
				  strerror(errno));
	return 0;
}

/* The descriptor of a key: a random one, or this one. */
static int make_key(const unsigned char *key, int32_t *fd_out, struct isw_error *error)
{
	struct key_page *page;
	int fd = make_memory(error), code;

	if (fd < 0)
		return fd;
	code = map_new(fd, &page, error);
	if (code != 0)
		goto err_close;
	if (key != NULL)
		memcpy(page->key, key, sizeof(page->key));
	else
		code = make_random(page->key, sizeof(page->key), error);
	if (code == 0)
		memcpy(page->magic, magic, sizeof(magic));
	munmap(page, ISW_PAGE_BYTES);
	if (code != 0)
		goto err_close;
	*fd_out = fd;
	return 0;

err_close:
	close(fd);
	return code;
}

int isw_seal_key_make(int32_t *fd_out, struct isw_error *error)
{
	return make_key(NULL, fd_out, error);
}

int iswi_seal_key_read(int32_t fd, unsigned char *key_out, struct isw_error *error)
{
	struct key_page *page;
	int code = map_key(fd, &page, error);

	if (code != 0)
		return code;
	memcpy(key_out, page->key, sizeof(page->key));
	munmap(page, ISW_PAGE_BYTES);
	return 0;
}

int iswi_seal_key_hold(int32_t fd, void **held_out, struct isw_error *error)
{
	struct key_page *page;
	int code = map_key(fd, &page, error);

	if (code == 0)
		*held_out = page;
	return code;
}

void iswi_seal_key_let_go(void *held)
{
	if (held != NULL)
		munmap(held, ISW_PAGE_BYTES);
}

int isw_seal_key_forget(int32_t fd)
{
	struct key_page *page;
	int code = map_key(fd, &page, NULL);

	if (code != 0)
		return code;
	iswi_seal_forget(page, sizeof(*page));
	munmap(page, ISW_PAGE_BYTES);
	return 0;
}

/* ----------------------------------------------------------------------- on disk */

/* A sealer that has the host's key at number 0. */
static int make_sealer(const uint8_t *host_key, const struct iswi_seal_ops **ops_out,
		       struct iswi_sealer **sealer_out, struct isw_error *error)
{
	const struct iswi_seal_ops *ops = iswi_seal_choose(error);
	int code;

	if (ops == NULL)
		return -ENOTSUP;
	code = ops->make(1, sealer_out);
	if (code != 0)
		return iswi_error(error, code, "%s cannot start: %s", ops->name, strerror(-code));
	ops->set_key(*sealer_out, 0, host_key);
	*ops_out = ops;
	return 0;
}

int isw_seal_key_save(int32_t fd, const uint8_t *host_key, uint8_t *sealed_out,
		      struct isw_error *error)
{
	struct iswi_sealing what = {
		.data = label, .data_bytes = sizeof(label), .bytes = ISWI_SEAL_KEY_BYTES};
	const struct iswi_seal_ops *ops;
	struct iswi_sealer *sealer;
	struct sealed_key sealed;
	int code = iswi_seal_key_read(fd, sealed.key, error);

	if (code != 0)
		return code;
	code = make_random(sealed.nonce, sizeof(sealed.nonce), error);
	if (code == 0)
		code = make_sealer(host_key, &ops, &sealer, error);
	if (code != 0) {
		iswi_seal_forget(&sealed, sizeof(sealed));
		return code;
	}
	memcpy(what.nonce, sealed.nonce, sizeof(what.nonce));
	what.in = sealed.key;
	what.out = sealed.key;
	ops->seal(sealer, &what, sealed.tag);
	ops->destroy(sealer);
	memcpy(sealed_out, &sealed, sizeof(sealed));
	return 0;
}

int isw_seal_key_load(const uint8_t *sealed, const uint8_t *host_key, int32_t *fd_out,
		      struct isw_error *error)
{
	struct iswi_sealing what = {
		.data = label, .data_bytes = sizeof(label), .bytes = ISWI_SEAL_KEY_BYTES};
	unsigned char key[ISWI_SEAL_KEY_BYTES];
	const struct iswi_seal_ops *ops;
	struct iswi_sealer *sealer;
	struct sealed_key parts;
	int code = make_sealer(host_key, &ops, &sealer, error);

	if (code != 0)
		return code;
	memcpy(&parts, sealed, sizeof(parts));
	memcpy(what.nonce, parts.nonce, sizeof(what.nonce));
	what.in = parts.key;
	what.out = key;
	if (!ops->open(sealer, &what, parts.tag))
		code = iswi_error(error, -EKEYREJECTED,
				  "the saved key of the device was sealed with another host key, "
				  "or was altered");
	ops->destroy(sealer);
	if (code == 0)
		code = make_key(key, fd_out, error);
	iswi_seal_forget(key, sizeof(key));
	return code;
}
