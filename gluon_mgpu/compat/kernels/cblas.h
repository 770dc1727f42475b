/* MXNet's headers call BLAS on CPUs, which is not compiled here. */
#pragma once
enum CBLAS_ORDER { CblasRowMajor = 101, CblasColMajor };
enum CBLAS_TRANSPOSE { CblasNoTrans = 111, CblasTrans };
enum CBLAS_UPLO { CblasUpper = 121, CblasLower };
enum CBLAS_DIAG { CblasNonUnit = 131, CblasUnit };
enum CBLAS_SIDE { CblasLeft = 141, CblasRight };
#define BLAS(name) template <class... T> float cblas_s##name(T...); template <class... T> double cblas_d##name(T...);
extern "C++" { BLAS(gemm) BLAS(gemv) BLAS(ger) BLAS(dot) BLAS(trsm) BLAS(trmm) BLAS(syrk) BLAS(axpy) BLAS(scal) }
